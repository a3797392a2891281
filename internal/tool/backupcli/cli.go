// Package backupcli is crust-backup: it shows the changed blocks of snapshots, and backs up and
// restores volumes by them.
package backupcli

import (
	"context"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/crust-proxy/crust-proxy/internal/tool/command"
	"github.com/crust-proxy/crust-proxy/internal/tool/printer"
)

// Env is the environment of crust-backup.
type Env struct {
	Out, Err io.Writer
	Getenv   func(string) string
	Terminal bool // Out is a terminal
	Width    int  // of its lines
}

// Main runs crust-backup on this machine and returns its exit code.
func Main(args []string) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	return Run(ctx, args, Env{
		Out: os.Stdout, Err: os.Stderr, Getenv: os.Getenv,
		Terminal: printer.IsTerminal(os.Stdout), Width: printer.Width(os.Stdout),
	})
}

// Run runs one command line and returns its exit code.
func Run(ctx context.Context, args []string, env Env) int {
	return command.Run(ctx, NewRoot(env), args)
}

// NewRoot returns crust-backup with its commands.
func NewRoot(env Env) *cobra.Command {
	out := &printer.Printer{Out: env.Out, Templates: printer.ParseTemplate, Colour: printer.UseColour(env.Terminal, env.Getenv)}
	root := &cobra.Command{
		Use:   "crust-backup",
		Short: "Back up and restore volumes by the changed blocks of their snapshots",
		Long: `crust-backup backs up volumes by the changed blocks of their snapshots, and
restores them. It needs no crust-proxy.

Exit codes: 0 done, 1 failed, 2 wrong usage.`,
	}
	root.AddCommand(blocksCmd(env, out), backupCmd(out), restoreCmd(out))
	command.Prepare(root, out, env.Err, nil)
	return root
}
