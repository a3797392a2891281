// Package cli is crustctl: it shows an operator the volumes of one node through
// the daemon's Admin API, and checks the node.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/cli/printer"
	"github.com/crust-proxy/crust-proxy/internal/cli/show"
	"github.com/crust-proxy/crust-proxy/internal/doctor"
)

// The exit codes.
const (
	ExitOK      = 0
	ExitFailure = 1
	ExitUsage   = 2
	// ExitFindings is doctor's, where it found an error.
	ExitFindings = 3
)

// Env is everything outside of crustctl that it uses, besides the daemon.
type Env struct {
	Out, Err io.Writer
	// Getenv reads the environment.
	Getenv func(string) string
	// Now gives the time from which ages are counted.
	Now func() time.Time
	// Terminal is true if Out is a terminal.
	Terminal bool
	// Keys is that terminal if keys can be read from it, else nil.
	Keys *os.File
	// Environ is the whole environment, and Host this machine's name.
	Environ []string
	Host    string
	// Node is what doctor checks, before flags change it.
	Node doctor.Node
}

// Main runs crustctl on this machine and gives its exit code.
func Main(args []string) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	host, _ := os.Hostname() // only shown
	env := Env{
		Out: os.Stdout, Err: os.Stderr, Getenv: os.Getenv, Now: time.Now,
		Terminal: printer.IsTerminal(os.Stdout), Node: doctor.DefaultNode(),
		Environ: os.Environ(), Host: host,
	}
	if env.Terminal && printer.IsTerminal(os.Stdin) {
		env.Keys = os.Stdin
	}
	return Run(ctx, args, env)
}

// Run runs one command line and gives its exit code.
func Run(ctx context.Context, args []string, env Env) int {
	root := newRoot(env)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return ExitOK
	}
	var usage *usageError
	if errors.Is(err, errFindings) {
		return ExitFindings // the findings are printed already
	}
	_, _ = fmt.Fprintln(env.Err, "crustctl: "+show.EscapeLines(err.Error())) // a failure to write cannot be reported
	if errors.As(err, &usage) {
		_, _ = fmt.Fprintf(env.Err, "See '%s --help'.\n", usage.command)
		return ExitUsage
	}
	return ExitFailure
}
