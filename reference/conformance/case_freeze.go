package conformance

import (
	"context"
	"errors"
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

// freezeCase freezes a volume while a container writes to it.
type freezeCase struct{ f *fixture }

func runFreeze(ctx context.Context, s *suite) error {
	f, err := newFixture(ctx, s.node, s.node.podUID())
	if err != nil {
		return err
	}
	t := &freezeCase{f: f}
	var c *container
	var held *aside
	s.check(ctx, "thaw-idle", func(ctx context.Context) (err error) {
		if c, err = t.f.container(ctx, "main"); err != nil {
			return err
		}
		s.node.scratch.add(func(context.Context) error { return forceThaw(c) })
		return t.f.vol.wantRefused(ctx, abi.Thaw, t.f.vol.target)
	}, "mount-inside", "binding-program")
	s.check(ctx, "freeze-holds", func(ctx context.Context) error {
		if err := t.freezes(ctx, longFreeze); err != nil {
			return err
		}
		held = startProbe(ctx, c, "write", "/data/aside", "x")
		return held.waits(ctx, heldFor)
	}, "thaw-idle")
	s.check(ctx, "freeze-stats", func(ctx context.Context) error {
		_, err := t.f.vol.stats(ctx)
		return err
	}, "freeze-holds")
	s.check(ctx, "freeze-twice", func(ctx context.Context) error {
		err := t.f.vol.wantRefused(ctx, abi.Freeze, t.f.vol.target, "1")
		return errors.Join(err, held.waits(ctx, heldFor+time.Second))
	}, "freeze-holds")
	s.check(ctx, "freeze-thaw", func(ctx context.Context) error {
		if err := t.thaws(ctx); err != nil {
			return err
		}
		return held.ends(ctx, lateBy)
	}, "freeze-holds")
	s.check(ctx, "freeze-auto", func(ctx context.Context) error {
		if err := t.freezes(ctx, shortFreeze); err != nil {
			return err
		}
		late := startProbe(ctx, c, "write", "/data/aside", "x")
		err := errors.Join(late.waits(ctx, heldFor), late.ends(ctx, shortFreeze+lateBy))
		if err != nil {
			// Do not leave this freeze to the next requirements.
			_, thawErr := t.f.vol.ask(ctx, abi.Thaw, t.f.vol.target)
			err = errors.Join(err, thawErr)
		}
		return err
	}, "freeze-thaw")
	s.check(ctx, "thaw-late", func(ctx context.Context) error {
		return t.f.vol.wantRefused(ctx, abi.Thaw, t.f.vol.target)
	}, "freeze-auto")
	s.check(ctx, "thaw-dead", func(ctx context.Context) error { return t.thawsDead(ctx, c) }, "freeze-thaw")
	return nil
}

// thawsDead kills the sandbox while its volume is frozen.
func (t *freezeCase) thawsDead(ctx context.Context, c *container) error {
	if err := t.freezes(ctx, longFreeze); err != nil {
		return err
	}
	if err := errors.Join(t.f.pod.sandbox.kill(ctx, unix.SIGKILL), c.kill(ctx, unix.SIGKILL)); err != nil {
		return err
	}
	if err := t.thaws(ctx); err != nil {
		return err
	}
	return t.f.disk.waitFree(ctx)
}

func (t *freezeCase) thaws(ctx context.Context) error {
	return t.f.vol.wantExit(ctx, abi.ExitOK, abi.Thaw, t.f.vol.target)
}

func (t *freezeCase) freezes(ctx context.Context, most time.Duration) error {
	return t.f.vol.wantExit(ctx, abi.ExitOK, abi.Freeze, t.f.vol.target, strconv.Itoa(int(most/time.Second)))
}

// forceThaw undoes a freeze that the handler forgot, if its mount is in this kernel:
// a frozen filesystem cannot be unmounted.
func forceThaw(c *container) error {
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
