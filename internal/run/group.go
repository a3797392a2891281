// Package run runs the components of a process together and ends them together.
package run

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// Func is a component. It works until ctx ends, and returns nil when it ended
// because ctx did.
type Func func(ctx context.Context) error

// Group is components that live and end together. Add them all, then Run.
type Group struct {
	parts []part
}

type part struct {
	name string
	run  Func
}

// Add adds a component under the name that its errors will carry.
func (g *Group) Add(name string, component Func) {
	g.parts = append(g.parts, part{name: name, run: component})
}

// Run starts all components and waits for all. The first that fails ends the
// others, which find its error as the cause of their context. A component that
// returns nil is done; the others go on.
func (g *Group) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	failures := make([]error, len(g.parts))
	var wg sync.WaitGroup
	for i, p := range g.parts {
		wg.Go(func() {
			if err := p.run(ctx); err != nil {
				failures[i] = named(ctx, p.name, err)
				cancel(failures[i])
			}
		})
	}
	wg.Wait()
	return errors.Join(failures...)
}

// named adds the component's name. The end of the group's own context is no
// failure of who reports it.
func named(ctx context.Context, name string, err error) error {
	if ctx.Err() != nil && (errors.Is(err, context.Canceled) || err == context.Cause(ctx)) { //nolint:errorlint // the very value is meant, not its kind
		return nil
	}
	return fmt.Errorf("%s: %w", name, err)
}
