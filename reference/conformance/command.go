package conformance

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/spf13/pflag"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/internal/tool/printer"
	"github.com/crust-proxy/crust-proxy/internal/tool/show"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

const help = `Test a runtime handler that has runc's command line against the demands of
docs/runtime-authors.md: on a loop device, a guard mount and a volume of its own,
which are removed at the end. It needs root, and neither a container runtime nor
crust-proxy.

Usage:
  crust-conformance --runtime PROGRAM [flags]
  crust-conformance driver --help
  crust-conformance snapshot-metadata --help

Examples:
  sudo crust-conformance --runtime /usr/bin/crust-runc --fs xfs

Exit codes: 0 all demands are met, 1 one is not or the run failed, 2 wrong usage.

Flags:
`

// command is one command line of crust-conformance.
type command struct {
	opts Options
	out  *printer.Printer
}

// Main runs crust-conformance and returns its exit code. In the containers of a test case the
// same program is the probe.
func Main(args []string) int {
	if len(args) > 0 && args[0] == ProbeWord {
		return Probe(args[1:], os.Stdin, os.Stdout, os.Stderr)
	}
	if slices.Equal(args, []string{"--version"}) {
		sys.PrintVersion(os.Stdout, "crust-conformance")
		return 0
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	colour := printer.UseColour(printer.IsTerminal(os.Stdout), os.Getenv)
	return runCommand(ctx, args, &printer.Printer{Out: os.Stdout, Colour: colour}, os.Stderr)
}

func runCommand(ctx context.Context, args []string, out *printer.Printer, stderr io.Writer) int {
	c := &command{opts: Options{Root: abi.DefaultRoot, FSType: "ext4", Dir: "/var/tmp"}, out: out}
	usage, err := c.parse(args)
	switch {
	case errors.Is(err, pflag.ErrHelp):
		_, _ = io.WriteString(out.Out, help+usage)
		return 0
	case err != nil:
		_, _ = fmt.Fprintf(stderr, "crust-conformance: %s\nSee 'crust-conformance --help'.\n", show.EscapeLines(err.Error()))
		return 2
	}
	if err := c.run(ctx); err != nil {
		_, _ = fmt.Fprintln(stderr, "crust-conformance: "+show.EscapeLines(err.Error()))
		return 1
	}
	return 0
}

// parse parses the flags. It also returns their usage text.
func (c *command) parse(args []string) (usage string, err error) {
	flags := pflag.NewFlagSet("crust-conformance", pflag.ContinueOnError)
	flags.Usage = func() {} // runCommand prints it
	flags.StringVar(&c.opts.Runtime, "runtime", "", "the handler's program")
	flags.StringVar(&c.opts.Root, "root", c.opts.Root, "where the handler looks for the directories of volumes")
	flags.StringVar(&c.opts.FSType, "fs", c.opts.FSType, "the volumes' filesystem: ext4, xfs or btrfs")
	flags.StringVar(&c.opts.Dir, "dir", c.opts.Dir, "where the simulated node gets its directory")
	flags.StringSliceVar(&c.opts.Only, "only", nil, fmt.Sprintf("run only these test cases: %v", CaseNames()))
	flags.StringVarP(&c.out.Format, "output", "o", printer.FormatTable, "table, wide, json or yaml")
	if err := flags.Parse(args); err != nil {
		return flags.FlagUsages(), err
	}
	return "", c.check(flags.Args())
}

func (c *command) check(args []string) error {
	if len(args) > 0 {
		return fmt.Errorf("crust-conformance does not take %q", args[0])
	}
	if err := errors.Join(c.out.Check(), c.opts.Check()); err != nil {
		return err
	}
	program, err := exec.LookPath(c.opts.Runtime)
	if err == nil {
		c.opts.Runtime, err = filepath.Abs(program)
	}
	if err != nil {
		return fmt.Errorf("--runtime: %w", err)
	}
	return nil
}

func (c *command) run(ctx context.Context) error {
	return Print(c.out, "the handler", func(onResult func(Result)) (Report, error) {
		report, err := Run(ctx, c.opts, onResult)
		switch {
		case errors.Is(err, context.Canceled):
			err = errors.New("interrupted: what was made is removed again")
		case err != nil && ctx.Err() != nil: // the error of a program that was killed
			err = fmt.Errorf("interrupted: %w", err)
		}
		return report, err
	})
}

// Print prints each result of a run, and the sums, or for a program all results at the end. It fails if a demand is
// not met; tested is the subject of that error.
func Print(out *printer.Printer, tested string, run func(onResult func(Result)) (Report, error)) error {
	report, err := run(func(r Result) {
		if !out.Machine() {
			printResult(out, r)
		}
	})
	if err != nil && len(report.Results) == 0 {
		return err
	}
	failed := report.Count(Fail)
	var printing error
	if out.Machine() {
		printing = out.JSON(report)
	} else {
		printing = out.Line(fmt.Sprintf("\n%d passed, %d failed, %d skipped", report.Count(Pass), failed, report.Count(Skip)))
	}
	if err = errors.Join(err, printing); failed > 0 {
		err = errors.Join(err, fmt.Errorf("%s does not meet %d of %d demands", tested, failed, len(report.Results)))
	}
	return err
}

func printResult(out *printer.Printer, r Result) {
	colour := map[Status]string{Pass: show.Green, Fail: show.Red, Skip: show.Yellow}[r.Status]
	line := fmt.Sprintf("%s %s %s", out.Paint(colour, string(r.Status)), out.Paint(show.Faint, fmt.Sprintf("%-18s", r.Name)), r.Demand)
	if r.Seen != "" {
		line += out.Field(24, "seen:", r.Seen)
	}
	if r.Status == Fail && r.Section != "" {
		line += out.Field(24, "see:", "docs/runtime-authors.md, section "+r.Section)
	}
	_, _ = fmt.Fprintln(out.Out, line) // the sums fail, too
}
