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
	select {
	case err := <-a.done:
		a.done <- err
		return errors.Join(errors.New("a write did not wait while the volume was frozen"), err)
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(limit):
		return nil
	}
}

// ends fails if the write does not end within a time.
func (a *aside) ends(ctx context.Context, limit time.Duration) error {
	select {
	case err := <-a.done:
		a.done <- err
		return err
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(limit):
		return fmt.Errorf("a write still waits %v after the volume should have been thawed", limit)
	}
}
