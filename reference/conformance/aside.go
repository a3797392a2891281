package conformance

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// aside is the probe while it runs in the background.
type aside struct{ done chan error }

// startProbe runs the probe in the background.
func startProbe(ctx context.Context, c *container, words ...string) *aside {
	a := &aside{done: make(chan error, 1)}
	go func() {
		_, err := c.exec(ctx, words...)
		a.done <- err
	}()
	return a
}

// waits fails if the write ends within a time.
func (a *aside) waits(ctx context.Context, limit time.Duration) error {
	ended, err := a.ended(ctx, limit)
	if ended {
		err = errors.Join(errors.New("a write did not wait while the volume was frozen"), err)
	}
	return err
}

// ends fails if the probe does not end within a time.
func (a *aside) ends(ctx context.Context, limit time.Duration) error {
	ended, err := a.ended(ctx, limit)
	if !ended && err == nil {
		err = fmt.Errorf("the write still waits after %v, although the volume should not be frozen", limit)
	}
	return err
}

// ended reports whether the probe ends within a time, and how. It may be asked again.
func (a *aside) ended(ctx context.Context, limit time.Duration) (bool, error) {
	select {
	case err := <-a.done:
		a.done <- err
		return true, err
	case <-ctx.Done():
		return false, ctx.Err()
	case <-time.After(limit):
		return false, nil
	}
}
