// Package cli is crustctl: it shows an operator the volumes of one node through
// the daemon's Admin API, and checks the node.
package cli

import (
	"cmp"
	"context"
	"errors"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/crust-proxy/crust-proxy/internal/tool/command"
	"github.com/crust-proxy/crust-proxy/internal/tool/doctor"
	"github.com/crust-proxy/crust-proxy/internal/tool/printer"
)

// ExitFindings is doctor's exit code if it found an error.
const ExitFindings = 3

// Env is the environment of crustctl, without the daemon.
type Env struct {
	Out, Err io.Writer
	Getenv   func(string) string
	Environ  []string
	Host     string           // this machine's name
	Now      func() time.Time // ages are counted from it
	Terminal bool             // Out is a terminal
	Width    int              // of its lines
	Keys     *os.File         // that terminal if keys can be read from it, else nil
	Node     doctor.Node      // what doctor checks, before flags change it
}

// Main runs crustctl on this machine and returns its exit code.
func Main(args []string) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	host, _ := os.Hostname() // only shown
	env := Env{
		Out: os.Stdout, Err: os.Stderr, Getenv: os.Getenv, Now: time.Now,
		Terminal: printer.IsTerminal(os.Stdout), Width: printer.Width(os.Stdout), Node: doctor.DefaultNode(),
		Environ: os.Environ(), Host: host,
	}
	if env.Terminal && printer.IsTerminal(os.Stdin) {
		env.Keys = os.Stdin
	}
	return Run(ctx, args, env)
}

// Run runs one command line and returns its exit code.
func Run(ctx context.Context, args []string, env Env) int {
	root := newRoot(env)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if errors.Is(err, errFindings) {
		return ExitFindings // the findings are printed already
	}
	return command.Report(root, err)
}

const (
	socketVariable = "CRUSTCTL_SOCKET"
	defaultTimeout = 30 * time.Second
)

func newRoot(env Env) *cobra.Command {
	d := &daemon{service: env.Node.Service}
	out := &printer.Printer{Out: env.Out, Colour: printer.UseColour(env.Terminal, env.Getenv)}
	view := &volumeView{out: out, now: env.Now}
	root := &cobra.Command{
		Use:   "crustctl",
		Short: "Look at and repair the deferred volumes of this node",
		Long: `crustctl talks to crust-proxy on this node through its Admin API.

VOLUME is a volume's target path, its id, or the beginning of its id (6 digits
or more).

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 doctor found errors.`,
	}
	root.SetOut(env.Out)
	root.SetErr(env.Err)
	flags := root.PersistentFlags()
	flags.StringVar(&d.socket, "socket", cmp.Or(env.Getenv(socketVariable), env.Node.AdminSocket), "the daemon's admin socket (also "+socketVariable+")")
	flags.DurationVar(&d.timeout, "timeout", defaultTimeout, "how long to wait for the daemon; 0 waits for ever")
	flags.StringVarP(&out.Format, "output", "o", printer.FormatTable, "table, wide, json or yaml")
	command.Complete(root, "output", printer.Formats()...)
	root.PersistentPreRunE = func(cmd *cobra.Command, _ []string) error {
		if err := cmp.Or(out.Check(), d.check()); err != nil {
			return command.WrongUsage(cmd, err)
		}
		return nil
	}
	root.AddCommand(topCmd(env, d, out), listCmd(d, view), getCmd(d, view), statsCmd(d, view), expandCmd(d, out), freezeCmd(d, out), thawCmd(d, out),
		releaseCmd(d, out), endCmd(d, out, env.Keys), watchCmd(d, view), handlersCmd(d, out), driversCmd(d, view), reconcileCmd(d, out), doctorCmd(env.Node, d, out),
		versionCmd(d, out))
	command.Prepare(root)
	return root
}
