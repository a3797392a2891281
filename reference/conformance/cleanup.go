package conformance

import (
	"context"
	"errors"
)

// cleanup is a stack of steps that remove what was made; the last step runs first.
type cleanup struct {
	steps []func(context.Context) error
}

func (c *cleanup) add(step func(context.Context) error) { c.steps = append(c.steps, step) }

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
