// Package run runs the components of the daemon side by side: the first that
// fails ends all the others.
package run

import (
	"context"
	"fmt"

	"golang.org/x/sync/errgroup"
)

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

// Go starts a component under a name that its error will carry. Its run works until ctx
// ends, and returns nil then.
func (g *Group) Go(name string, run func(ctx context.Context) error) {
	g.parts.Go(func() error {
		if err := run(g.ctx); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		return nil
	})
}

// Wait waits for all components and gives the first error.
func (g *Group) Wait() error { return g.parts.Wait() }
