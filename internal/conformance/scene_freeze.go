package conformance

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// The times of a freeze: long enough for slow machines, and short enough to wait
// for.
const (
	longFreeze  = 60 * time.Second
	shortFreeze = 3 * time.Second
	// heldFor is how long a write is watched while it must not end.
	heldFor = time.Second
	// lateBy bounds how late the automatic thaw may be.
	lateBy = 10 * time.Second
	// fiThaw is FITHAW of the kernel's linux/fs.h.
	fiThaw = 0xc0045878
)

// freeze holds a volume still.
func (s *suite) freeze(ctx context.Context) error {
	st, err := s.set(ctx)
	if err != nil {
		return err
	}
	var c *container
	var held *writing
	s.check(ctx, "thaw-idle", func(ctx context.Context) (err error) {
		if c, err = st.pod.container(ctx, "main", all(st.vol)); err != nil {
			return err
		}
		s.node.later(c.forceThaw)
		return st.vol.wantRefused(ctx, abi.Thaw, st.vol.target)
	}, "mount-inside", "binding-program")
	s.check(ctx, "freeze-holds", func(ctx context.Context) error {
		if err := st.freezes(ctx, longFreeze); err != nil {
			return err
		}
		held = c.writeAside(ctx)
		return held.waits(ctx, heldFor)
	}, "thaw-idle")
	s.check(ctx, "freeze-stats", func(ctx context.Context) error {
		_, err := st.vol.stats(ctx)
		return err
	}, "freeze-holds")
	s.check(ctx, "freeze-twice", func(ctx context.Context) error {
		err := st.vol.wantRefused(ctx, abi.Freeze, st.vol.target, "1")
		return errors.Join(err, held.waits(ctx, heldFor+time.Second))
	}, "freeze-holds")
	s.check(ctx, "freeze-thaw", func(ctx context.Context) error {
		if err := st.thaws(ctx); err != nil {
			return err
		}
		return held.ends(ctx, lateBy)
	}, "freeze-holds")
	s.check(ctx, "freeze-auto", func(ctx context.Context) error {
		if err := st.freezes(ctx, shortFreeze); err != nil {
			return err
		}
		late := c.writeAside(ctx)
		err := errors.Join(late.waits(ctx, heldFor), late.ends(ctx, shortFreeze+lateBy))
		if err != nil {
			// What follows is of other freezes.
			_, thawErr := st.vol.ask(ctx, abi.Thaw, st.vol.target)
			err = errors.Join(err, thawErr)
		}
		return err
	}, "freeze-thaw")
	s.check(ctx, "thaw-late", func(ctx context.Context) error {
		return st.vol.wantRefused(ctx, abi.Thaw, st.vol.target)
	}, "freeze-auto")
	s.check(ctx, "thaw-dead", func(ctx context.Context) error { return st.thawsDead(ctx, c) }, "freeze-thaw")
	return nil
}

// thawsDead has the sandbox die while its volume is frozen.
func (st *stage) thawsDead(ctx context.Context, c *container) error {
	if err := st.freezes(ctx, longFreeze); err != nil {
		return err
	}
	if err := errors.Join(st.pod.sandbox.kill(ctx, unix.SIGKILL), c.kill(ctx, unix.SIGKILL)); err != nil {
		return err
	}
	if err := st.thaws(ctx); err != nil {
		return err
	}
	return eventually(ctx, endsWithin, func(context.Context) error { return st.disk.free() })
}

func (st *stage) thaws(ctx context.Context) error {
	return st.vol.wantExit(ctx, abi.ExitOK, abi.Thaw, st.vol.target)
}

func (st *stage) freezes(ctx context.Context, most time.Duration) error {
	return st.vol.wantExit(ctx, abi.ExitOK, abi.Freeze, st.vol.target, strconv.Itoa(int(most/time.Second)))
}

// writing is a write that may take its time.
type writing struct{ done chan error }

// writeAside begins one.
func (c *container) writeAside(ctx context.Context) *writing {
	return c.aside(ctx, "write", "/data/aside", "x")
}

// aside runs the probe beside what follows.
func (c *container) aside(ctx context.Context, words ...string) *writing {
	w := &writing{done: make(chan error, 1)}
	go func() {
		_, err := c.exec(ctx, words...)
		w.done <- err
	}()
	return w
}

// waits fails where the write ends within a time.
func (w *writing) waits(ctx context.Context, most time.Duration) error {
	select {
	case err := <-w.done:
		w.done <- err
		return errors.Join(errors.New("a write did not wait while the volume was frozen"), err)
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(most):
		return nil
	}
}

// ends fails where it does not end within a time.
func (w *writing) ends(ctx context.Context, most time.Duration) error {
	select {
	case err := <-w.done:
		w.done <- err
		return err
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(most):
		return fmt.Errorf("a write still waits %v after the volume should have been thawed", most)
	}
}

// forceThaw undoes a freeze that the handler forgot, where its mount is of this
// kernel: else nothing could ever be unmounted.
func (c *container) forceThaw(context.Context) error {
	fd, err := unix.Open("/proc/"+c.pid+"/root/data", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil //nolint:nilerr // the container has ended, and with it the mount
	}
	defer func() { _ = unix.Close(fd) }()
	err = unix.IoctlSetInt(fd, fiThaw, 0)
	if errors.Is(err, unix.EINVAL) { // it is not frozen
		return nil
	}
	return err
}
