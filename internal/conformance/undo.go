package conformance

import (
	"context"
	"errors"
)

// undo is a stack of what is to be done in the end, the last first.
type undoStack struct {
	steps []func(context.Context) error
}

func (u *undoStack) later(step func(context.Context) error) { u.steps = append(u.steps, step) }

// undo does all of it, also after an error. It may be called again.
func (u *undoStack) undo(ctx context.Context) error {
	var errs []error
	for len(u.steps) > 0 {
		last := len(u.steps) - 1
		step := u.steps[last]
		u.steps = u.steps[:last]
		errs = append(errs, step(ctx))
	}
	return errors.Join(errs...)
}
