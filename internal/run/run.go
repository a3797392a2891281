// Package run runs the components of the daemon side by side: the first that
// fails ends all the others.
package run

import (
	"context"
	"fmt"
	"sync"
)

// Component is a part of the daemon.
type Component interface {
	// Run works until ctx ends, and returns nil then.
	Run(ctx context.Context) error
}

// Func makes a component of a function.
type Func func(ctx context.Context) error

// Run calls the function.
func (f Func) Run(ctx context.Context) error { return f(ctx) }

// Group is components that live and end together.
type Group struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	parts  sync.WaitGroup
	once   sync.Once
	err    error
}

// New makes a group whose components end when parent does, or when one fails.
func New(parent context.Context) *Group {
	ctx, cancel := context.WithCancelCause(parent)
	return &Group{ctx: ctx, cancel: cancel}
}

// Go starts a component under a name that its error will carry.
func (g *Group) Go(name string, part Component) {
	g.parts.Go(func() {
		if err := part.Run(g.ctx); err != nil {
			g.fail(fmt.Errorf("%s: %w", name, err))
		}
	})
}

func (g *Group) fail(err error) {
	g.once.Do(func() {
		g.err = err
		g.cancel(err)
	})
}

// Wait waits for all components and gives the first error.
func (g *Group) Wait() error {
	g.parts.Wait()
	g.cancel(nil)
	return g.err
}
