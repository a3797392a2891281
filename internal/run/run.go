// Package run runs the components of the daemon side by side: the first that
// fails ends all the others.
package run

import (
	"context"
	"fmt"

	"golang.org/x/sync/errgroup"
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
	ctx   context.Context
	parts *errgroup.Group
}

// New makes a group whose components end when parent does, or when one fails.
func New(parent context.Context) *Group {
	parts, ctx := errgroup.WithContext(parent)
	return &Group{ctx: ctx, parts: parts}
}

// Go starts a component under a name that its error will carry.
func (g *Group) Go(name string, part Component) {
	g.parts.Go(func() error {
		if err := part.Run(g.ctx); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		return nil
	})
}

// Wait waits for all components and gives the first error.
func (g *Group) Wait() error { return g.parts.Wait() }
