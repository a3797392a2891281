package conformance

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// runLife kills containers and sandboxes.
func runLife(t *trial, s *suite) {
	f := newFixture(t, s.node, s.node.podUID())
	var c *container
	s.check(t, "life-container", func(t *trial) {
		c = f.container(t, "main")
		seesFilesystem(t, c)
		t.must(errors.Join(c.kill(t.ctx, unix.SIGKILL), c.remove(t.ctx)))
		if _, err := f.vol.stats(t.ctx); err != nil {
			t.must(fmt.Errorf("when the pod's only container had ended: %w", err))
		}
		c = f.container(t, "main")
		t.exec(c, "read", "/data/greeting")
	}, "mount-inside", "binding-program")
	var notes map[string][]byte
	s.check(t, "life-free", func(t *trial) {
		notes = f.vol.handlerFiles(t)
		// The sandbox is killed first, as by an out-of-memory killer.
		t.must(errors.Join(f.pod.sandbox.kill(t.ctx, unix.SIGKILL), c.kill(t.ctx, unix.SIGKILL)))
		t.must(f.disk.waitFree(t.ctx))
	}, "life-container")
	s.check(t, "life-answer", func(t *trial) {
		f.vol.putBack(t, notes)
		t.must(f.vol.wantExit(t.ctx, abi.ExitNoSandbox, abi.Stats, f.vol.target))
	}, "life-free", "binding-program")
	s.check(t, "life-again", func(t *trial) {
		f.pod = newPod(t, s.node, f.vol.owner)
		c = f.container(t, "main")
		t.wantText(c, "/data/greeting", "a file from before", "hello")
	}, "life-free")
	s.check(t, "life-newest", func(t *trial) { // while the dead sandbox's file is still there
		f.vol.putBack(t, notes)
		f.statsAreSane(t)
		var no unsupported
		if err := f.vol.socketAnswers(t.ctx, f.pod.sandbox.id); !errors.As(err, &no) {
			t.must(err)
		}
	}, "life-again", "life-answer", "binding-program")
}
