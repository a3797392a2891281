// Package ctl is crustctl: it shows an operator the volumes of one node through
// the daemon's Admin API, and checks the node.
package ctl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/conformance"
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

// World is all of the outside that crustctl touches beside the daemon.
type World struct {
	Out, Err io.Writer
	// Getenv reads the environment.
	Getenv func(string) string
	// Now tells the time, against which ages are shown.
	Now func() time.Time
	// Terminal is true where Out is one.
	Terminal bool
	// Keys is the terminal that Out is, where keys can be read from it; nil where not.
	Keys *os.File
	// Environ is the environment as a whole, and Host this machine's name.
	Environ []string
	Host    string
	// Node is what doctor looks at before flags change it.
	Node doctor.Node
}

// Main runs crustctl on this machine and gives its exit code.
func Main(args []string) int {
	if len(args) > 0 && args[0] == conformance.ProbeWord {
		return conformance.Probe(args[1:], os.Stdin, os.Stdout, os.Stderr)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	host, _ := os.Hostname() // a name for people, and no more
	return Run(ctx, args, World{
		Out: os.Stdout, Err: os.Stderr, Getenv: os.Getenv, Now: time.Now,
		Terminal: isTerminal(os.Stdout), Node: doctor.DefaultNode(),
		Keys: keys(), Environ: os.Environ(), Host: host,
	})
}

// Run runs one command line and gives its exit code.
func Run(ctx context.Context, args []string, world World) int {
	root := newRoot(world)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return ExitOK
	}
	var usage *usageError
	if errors.Is(err, errFindings) {
		return ExitFindings // the findings are printed already
	}
	_, _ = fmt.Fprintln(world.Err, "crustctl: "+escapeLines(err.Error())) // nowhere is left to complain to
	if errors.As(err, &usage) {
		_, _ = fmt.Fprintf(world.Err, "See '%s --help'.\n", usage.command)
		return ExitUsage
	}
	return ExitFailure
}
