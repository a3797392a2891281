package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/crust-proxy/crust-proxy/internal/tool/command"
	"github.com/crust-proxy/crust-proxy/internal/tool/printer"
)

// exitFindings is the exit code if a node has an error or did not answer: as doctor's.
const exitFindings = 3

// ErrFindings is returned for errors that are shown already.
var ErrFindings = errors.New("a node has an error, or did not answer")

// tool is what the commands share.
type tool struct {
	access
	out *printer.Printer
	err io.Writer
	now func() time.Time
}

// Main is kubectl's plug-in: kubectl crust. It returns the exit code.
func Main(args []string) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second interrupt ends at once
	out := &printer.Printer{Out: os.Stdout, Colour: printer.UseColour(printer.IsTerminal(os.Stdout), os.Getenv)}
	return Run(ctx, args, out, os.Stderr)
}

// Run runs one command line of the plug-in, and returns its exit code.
func Run(ctx context.Context, args []string, out *printer.Printer, stderr io.Writer) int {
	root := NewRoot(out, stderr)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if errors.Is(err, ErrFindings) {
		return exitFindings
	}
	return command.Report(root, err)
}

// NewRoot makes the plug-in's commands.
func NewRoot(out *printer.Printer, stderr io.Writer) *cobra.Command {
	root := &cobra.Command{
		Use: "kubectl-crust", Short: "Look at the nodes of a cluster that have crust-proxy",
		Long: `kubectl crust asks the daemons of all nodes through the API server's proxy, with
the caller's own rights.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 a node has an error or did not
answer, a check or a test failed.`,
		Annotations: map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl crust"},
	}
	root.SetOut(out.Out)
	root.SetErr(stderr)
	root.PersistentFlags().StringVarP(&out.Format, "output", "o", printer.FormatTable, "table, wide, json or yaml")
	command.Complete(root, "output", printer.Formats()...)
	root.PersistentPreRunE = func(cmd *cobra.Command, _ []string) error {
		if err := out.Check(); err != nil {
			return command.WrongUsage(cmd, err)
		}
		return nil
	}
	root.AddCommand(Commands(out, stderr, time.Now)...)
	command.Prepare(root)
	return root
}

// Commands are those that crustctl has, too.
func Commands(out *printer.Printer, stderr io.Writer, now func() time.Time) []*cobra.Command {
	return []*cobra.Command{nodesCmd(out, stderr, now), volumesCmd(out, stderr, now)}
}

// newCommand makes a command that asks the cluster, or with a SERVICE its addresses.
func newCommand(out *printer.Printer, stderr io.Writer, now func() time.Time, cmd *cobra.Command, run func(context.Context, *tool, string) error) *cobra.Command {
	t := &tool{out: out, err: stderr, now: now}
	t.flags(cmd.PersistentFlags()) // they are described together
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if len(args) > 1 {
			return command.WrongUsage(cmd, fmt.Errorf("%s takes one SERVICE:PORT", cmd.Name()))
		}
		return nil
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return run(cmd.Context(), t, append(args, "")[0])
	}
	return cmd
}

func nodesCmd(out *printer.Printer, stderr io.Writer, now func() time.Time) *cobra.Command {
	return newCommand(out, stderr, now, &cobra.Command{
		Use: "nodes [SERVICE:PORT]", Short: "Show the nodes of the cluster that have crust-proxy",
		Long: `Show the nodes of the cluster: of each the daemon's version, volumes, drivers,
findings and configuration. Without SERVICE, the API server's proxy is used.`,
		Example: "  crustctl nodes --context prod -o wide",
	}, func(ctx context.Context, t *tool, service string) error {
		all, _, err := t.places(ctx, service)
		if err != nil {
			return err
		}
		return t.verdict(t.printNodes, t.ask(ctx, all, askNode))
	})
}

// verdict prints states. Its error is ErrFindings if one of them is bad.
func (t *tool) verdict(print func([]*state) error, states []*state) error {
	if err := print(states); err != nil {
		return err
	}
	for _, s := range states {
		if s.bad() {
			return ErrFindings
		}
	}
	return nil
}

func volumesCmd(out *printer.Printer, stderr io.Writer, now func() time.Time) *cobra.Command {
	var f filter
	cmd := newCommand(out, stderr, now, &cobra.Command{
		Use: "volumes [SERVICE:PORT]", Short: "List the volumes of all nodes of the cluster",
		Example: "  crustctl volumes --state degraded -n shop",
	}, func(ctx context.Context, t *tool, service string) error {
		all, _, err := t.places(ctx, service)
		if err != nil {
			return err
		}
		states := t.ask(ctx, all, func(ctx context.Context, s *state) error { return s.askVolumes(ctx, f.query()) })
		return t.verdict(func(states []*state) error { return t.printVolumes(states, f) }, states)
	})
	cmd.Flags().StringVarP(&f.namespace, "namespace", "n", "", "only volumes of pods in this namespace")
	cmd.Flags().StringVar(&f.driver, "driver", "", "only volumes of this CSI driver")
	cmd.Flags().StringVar(&f.state, "state", "", "only volumes in this state, such as degraded")
	return cmd
}
