// Package run runs the components of the daemon concurrently: the first that fails ends all
// others.
package run

import (
	"context"
	"fmt"

	"golang.org/x/sync/errgroup"
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

// Go starts a component. Its name is part of its error. The function run must return nil when
// its ctx ends.
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
