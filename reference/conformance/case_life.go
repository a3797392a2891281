package conformance

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// lifeCase kills containers and sandboxes.
type lifeCase struct{ f *fixture }

func runLife(ctx context.Context, s *suite) error {
	f, err := newFixture(ctx, s.node, s.node.podUID())
	if err != nil {
		return err
	}
	t := &lifeCase{f: f}
	var c *container
	s.check(ctx, "life-container", func(ctx context.Context) (err error) {
		if c, err = t.f.container(ctx, "main"); err != nil {
			return err
		}
		if err := seesFilesystem(ctx, c); err != nil {
			return err
		}
		if err := errors.Join(c.kill(ctx, unix.SIGKILL), c.remove(ctx)); err != nil {
			return err
		}
		if _, err := t.f.vol.stats(ctx); err != nil {
			return fmt.Errorf("when the pod's only container had ended: %w", err)
		}
		c, err = t.f.container(ctx, "main")
		if err != nil {
			return err
		}
		_, err = c.exec(ctx, "read", "/data/greeting")
		return err
	}, "mount-inside", "binding-program")
	var notes map[string][]byte
	s.check(ctx, "life-free", func(ctx context.Context) (err error) {
		if notes, err = t.f.vol.handlerFiles(); err != nil {
			return err
		}
		// The sandbox is killed first, as by an out-of-memory killer.
		if err := errors.Join(t.f.pod.sandbox.kill(ctx, unix.SIGKILL), c.kill(ctx, unix.SIGKILL)); err != nil {
			return err
		}
		return t.f.disk.waitFree(ctx)
	}, "life-container")
	s.check(ctx, "life-answer", func(ctx context.Context) error {
		if err := t.f.vol.putBack(notes); err != nil {
			return err
		}
		return t.f.vol.wantExit(ctx, abi.ExitNoSandbox, abi.Stats, t.f.vol.target)
	}, "life-free", "binding-program")
	s.check(ctx, "life-again", func(ctx context.Context) (err error) {
		if t.f.pod, err = newPod(ctx, s.node, t.f.vol.owner); err != nil {
			return err
		}
		if c, err = t.f.container(ctx, "main"); err != nil {
			return err
		}
		return c.wantText(ctx, "/data/greeting", "a file from before", "hello")
	}, "life-free")
	s.check(ctx, "life-newest", func(ctx context.Context) error { return t.newestAnswers(ctx, notes) }, "life-again", "life-answer", "binding-program")
	return nil
}

// newestAnswers asks while the dead sandbox's file is still there.
func (t *lifeCase) newestAnswers(ctx context.Context, dead map[string][]byte) error {
	if err := t.f.vol.putBack(dead); err != nil {
		return err
	}
	if err := t.f.statsAreSane(ctx); err != nil {
		return err
	}
	var no unsupported
	err := t.f.vol.socketAnswers(ctx, t.f.pod.sandbox.id)
	if errors.As(err, &no) {
		return nil
	}
	return err
}
