package conformance

import (
	"context"
	"errors"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// The times of a freeze: long enough for slow machines, and short enough to wait for.
const (
	longFreeze  = 60 * time.Second
	shortFreeze = 3 * time.Second
	// heldFor is how long a write is observed that must not end.
	heldFor = time.Second
	// lateBy bounds how late the automatic thaw may be.
	lateBy = 20 * time.Second
	// fiThaw is FITHAW of the kernel's linux/fs.h.
	fiThaw = 0xc0045878
)

// runFreeze freezes a volume while a container writes to it.
func runFreeze(t *trial, s *suite) {
	f := newFixture(t, s.node, s.node.podUID())
	var c *container
	var held *aside
	s.check(t, "thaw-idle", func(t *trial) {
		c = f.container(t, "main")
		s.node.scratch.add(func(context.Context) error { return forceThaw(c) })
		t.must(f.vol.wantExit(t.ctx, abi.ExitWrongState, abi.Thaw, f.vol.target))
	}, "mount-inside", "binding-program")
	s.check(t, "freeze-holds", func(t *trial) {
		freezeVolume(t, f, longFreeze)
		began := time.Now()
		t.exec(c, "usage", "/tmp") // how long it takes to start a probe: a write can only wait after that
		start := 2 * time.Since(began)
		held = startProbe(t.ctx, c, "write", "/data/aside", "x")
		t.must(held.waits(t.ctx, start+heldFor))
	}, "thaw-idle")
	s.check(t, "freeze-stats", func(t *trial) {
		_, err := f.vol.stats(t.ctx)
		t.must(err)
	}, "freeze-holds")
	s.check(t, "freeze-twice", func(t *trial) {
		err := f.vol.wantExit(t.ctx, abi.ExitWrongState, abi.Freeze, f.vol.target, "1")
		t.must(errors.Join(err, held.waits(t.ctx, heldFor+time.Second)))
	}, "freeze-holds")
	s.check(t, "freeze-thaw", func(t *trial) {
		thawVolume(t, f)
		t.must(held.ends(t.ctx, lateBy))
	}, "freeze-holds")
	s.check(t, "freeze-auto", func(t *trial) {
		freezeVolume(t, f, shortFreeze)
		late := startProbe(t.ctx, c, "write", "/data/aside", "x")
		err := errors.Join(late.waits(t.ctx, heldFor), late.ends(t.ctx, shortFreeze+lateBy))
		if err != nil {
			// The next requirements must not find the volume frozen.
			_, thawErr := f.vol.ask(t.ctx, abi.Thaw, f.vol.target)
			err = errors.Join(err, thawErr)
		}
		t.must(err)
	}, "freeze-thaw")
	s.check(t, "thaw-late", func(t *trial) { t.must(f.vol.wantExit(t.ctx, abi.ExitWrongState, abi.Thaw, f.vol.target)) }, "freeze-auto")
	s.check(t, "thaw-dead", func(t *trial) { // the sandbox is killed while its volume is frozen
		freezeVolume(t, f, longFreeze)
		t.must(errors.Join(f.pod.sandbox.kill(t.ctx, unix.SIGKILL), c.kill(t.ctx, unix.SIGKILL)))
		// The freeze of a virtual machine has ended with it.
		thawed, err := f.vol.ask(t.ctx, abi.Thaw, f.vol.target)
		t.must(err)
		if thawed.code != abi.ExitWrongState {
			t.must(wantStatus(thawed, abi.ExitOK, []string{abi.Thaw, f.vol.target}))
		}
		t.must(f.disk.waitFree(t.ctx))
	}, "freeze-thaw")
}

func thawVolume(t *trial, f *fixture) {
	t.must(f.vol.wantExit(t.ctx, abi.ExitOK, abi.Thaw, f.vol.target))
}

func freezeVolume(t *trial, f *fixture, most time.Duration) {
	t.must(f.vol.wantExit(t.ctx, abi.ExitOK, abi.Freeze, f.vol.target, strconv.Itoa(int(most/time.Second))))
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
