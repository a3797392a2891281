// Package run runs the components of the daemon concurrently: the first that fails ends all others.
package run

import (
	"context"
	"fmt"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
)

// Group is a set of components that end together.
type Group struct {
	ctx   context.Context
	parts *errgroup.Group
}

// New returns a group whose components end when parent ends, or when one of them fails.
func New(parent context.Context) *Group {
	parts, ctx := errgroup.WithContext(parent)
	return &Group{ctx: ctx, parts: parts}
}

// Go starts a component. Its name is part of its error. The function run must return nil when its ctx ends.
func (g *Group) Go(name string, run func(ctx context.Context) error) {
	g.parts.Go(func() error {
		if err := run(g.ctx); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		return nil
	})
}

// Wait waits for all components and returns the first error.
func (g *Group) Wait() error { return g.parts.Wait() }

// UntilSignal returns a context that SIGTERM or SIGINT ends, with the signal as its cause.
// A second signal kills the process at once. Call it before a slow start.
func UntilSignal(parent context.Context) (ctx context.Context, stop func()) {
	ctx, stop = signal.NotifyContext(parent, syscall.SIGTERM, syscall.SIGINT)
	context.AfterFunc(ctx, stop)
	return ctx, stop
}

// rollBackTime is how long calls that were cut off may take to undo what they began. A call that hangs in the kernel,
// or makes a filesystem, is not waited for any longer: what it leaves is the same as after a kill.
const rollBackTime = 2 * time.Second

// Drain lets the calls of a server end. If some have not ended in time, it calls cutOff and cancels them.
func Drain(server *grpc.Server, patience time.Duration, cutOff func()) {
	ended := make(chan struct{})
	go func() { server.GracefulStop(); close(ended) }()
	select {
	case <-ended:
		return
	case <-time.After(patience):
	}
	cutOff()
	server.Stop()
	select {
	case <-ended:
	case <-time.After(rollBackTime):
	}
}
