package conformance

import (
	"context"
	"errors"
	"sync"
)

// cleanup is a stack of steps that remove what was made; the last step runs first.
type cleanup struct {
	mu    sync.Mutex // containers are created at once
	steps []func(context.Context) error
}

func (c *cleanup) add(step func(context.Context) error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.steps = append(c.steps, step)
}

// run runs all steps, also after an error. It may be called again.
func (c *cleanup) run(ctx context.Context) error {
	var errs []error
	for len(c.steps) > 0 {
		last := len(c.steps) - 1
		step := c.steps[last]
		c.steps = c.steps[:last]
		errs = append(errs, step(ctx))
	}
	return errors.Join(errs...)
}
