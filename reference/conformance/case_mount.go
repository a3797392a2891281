package conformance

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

func runPlain(t *trial, s *suite) {
	s.check(t, "plain-container", func(t *trial) { startsPlain(t, newPod(t, s.node, s.node.podUID())) })
}

func startsPlain(t *trial, p *pod) {
	plain := p.n.path("kubelet", "plain-"+p.sandbox.id)
	t.must(os.MkdirAll(plain, 0o755)) //nolint:gosec // as on a node
	t.must(os.WriteFile(filepath.Join(plain, "file"), []byte("plain"), 0o600))
	c := t.container(p, "plain", bind{source: plain, at: "/data"})
	t.wantText(c, "/data/file", "what it reads from an ordinary mount", "plain")
}

// runVolume mounts one volume in two containers, and checks what the host sees of it.
func runVolume(t *trial, s *suite) {
	f := newFixture(t, s.node, s.node.podUID())
	var main *container
	s.check(t, "mount-inside", func(t *trial) {
		main = f.container(t, "main")
		seesFilesystem(t, main)
	})
	s.check(t, "mount-grown", func(t *trial) { isLarger(t, main, madeSize) }, "mount-inside")
	s.check(t, "binding-files", func(t *trial) { f.vol.hasBinding(t, f.pod.sandbox.id) }, "mount-inside")
	s.check(t, "binding-program", f.vol.namesProgram, "binding-files")
	s.check(t, "binding-info", f.vol.infoIsWhole, "mount-inside")
	s.check(t, "mount-shared", func(t *trial) {
		const path = "/data/from-second"
		second := f.container(t, "second")
		t.exec(second, "write", path, "second")
		t.wantText(main, path, "what the first container reads of the second one", "second")
		first, other := asked[map[string]seen](t, main, "look", path), asked[map[string]seen](t, second, "look", path)
		t.must(want("the file that the first container sees", first[path], other[path]))
	}, "mount-inside")
	s.check(t, "stats-true", func(t *trial) { t.must(f.statsAreTrue(t.ctx, main)) }, "binding-program")
	s.check(t, "stats-sane", f.statsAreSane, "binding-program")
	s.check(t, "cli-unknown", func(t *trial) {
		t.must(f.vol.wantExit(t.ctx, abi.ExitNoSandbox, abi.Stats, f.vol.target+"-other"))
	}, "binding-program")
	s.check(t, "cli-arguments", f.badArguments, "binding-program")
	s.check(t, "socket-same", func(t *trial) { t.must(f.vol.socketAnswers(t.ctx, f.pod.sandbox.id)) }, "stats-sane")
	s.check(t, "socket-codes", func(t *trial) { t.must(f.vol.socketRefuses(t.ctx)) }, "stats-sane")
	s.check(t, "mount-host", func(t *trial) { t.must(errors.Join(s.node.mounts.CheckNone(), f.vol.covered())) }, "mount-inside")
}

// runKeys mounts volumes with more and fewer keys than our broker writes, in one pod.
func runKeys(t *trial, s *suite) {
	uid := s.node.podUID()
	bare := newVolume(t, s.node, newDisk(t, s.node), uid, "bare")
	bare.publishOdd(t, func(info *abi.Info) {
		maps.DeleteFunc(info.Metadata, func(key, _ string) bool { return strings.HasPrefix(key, "crust.") })
	})
	f := newFixture(t, s.node, uid)
	f.vol.publishOdd(t, func(info *abi.Info) { info.Metadata["a-later-key"] = "value" })
	s.check(t, "mount-extra", func(t *trial) { seesFilesystem(t, f.container(t, "extra")) }, "mount-inside")
	s.check(t, "mount-bare", func(t *trial) { seesFilesystem(t, t.container(f.pod, "bare", all(bare))) }, "mount-inside")
}

// runMany has several volumes, several containers, and several attempts.
func runMany(t *trial, s *suite) {
	uid := s.node.podUID()
	second := newVolume(t, s.node, newDisk(t, s.node), uid, "second")
	second.published.MountFlags = mountOptions
	t.must(second.publish())
	f := newFixture(t, s.node, uid)
	s.check(t, "mount-killed", func(t *trial) { surviveKills(t, f) }, "mount-inside")
	s.check(t, "mount-two", func(t *trial) {
		place := f.vol.bindSub(t, "part")
		c := t.container(f.pod, "two", all(f.vol), bind{source: second.target, at: "/other"}, bind{source: place, at: "/mnt"})
		t.exec(c, "write", "/other/mark", "second")
		t.exec(c, "write", "/mnt/mark", "part")
		t.exec(c, "write", "/data/mark", "first")
		for path, wanted := range map[string]string{"/data/mark": "first", "/other/mark": "second", "/mnt/mark": "part", "/data/part/mark": "part"} {
			t.wantText(c, path, "what is in "+path, wanted)
		}
	}, "mount-killed")
	s.check(t, "mount-options", func(t *trial) {
		hasOptions(t, f, bind{source: second.target, at: "/data"})
		hasOptions(t, f, bind{source: second.target, at: "/data", mode: "ro"})
	}, "mount-two")
	alone := newFixture(t, s.node, s.node.podUID())
	s.check(t, "mount-at-once", func(t *trial) { mountsAtOnce(t, alone) }, "mount-inside")
}

// surviveKills kills the handler during create, each time a little later.
func surviveKills(t *trial, f *fixture) {
	for after := time.Millisecond; after < 300*time.Millisecond; after = after * 3 / 2 {
		c := newContainer(f.pod.n, "killed")
		short, cancel := context.WithTimeout(t.ctx, after)
		_, err := c.create(short, f.pod.containerSpec("killed", []bind{all(f.vol)}))
		ended := short.Err() == nil
		cancel()
		if ended {
			t.must(err)
			break // it finished before it was killed
		}
	}
	// As a container runtime does, it retries: the kernel unmounts what a killed attempt had
	// mounted only some time after its end.
	var c *container
	t.must(eventually(t.ctx, endsWithin, func(ctx context.Context) error {
		c = newContainer(f.pod.n, "main")
		return c.run(ctx, f.pod.containerSpec("main", []bind{all(f.vol)}))
	}))
	seesFilesystem(t, c)
}

// mountOptions are options of the mount, which a runtime can lose when it binds the mount.
var mountOptions = []string{"noatime", "nosuid", "nodev", "noexec"}

func hasOptions(t *trial, f *fixture, b bind) {
	c := t.container(f.pod, "options", b)
	var has []string
	for line := range strings.Lines(t.exec(c, "read", "/proc/self/mountinfo")) {
		if fields := strings.Fields(line); len(fields) > 5 && fields[4] == b.at {
			has = strings.Split(fields[5], ",")
		}
	}
	for _, option := range mountOptions {
		t.that(slices.Contains(has, option), "the option %s is not among those of the mount: %s", option, has)
	}
}

// mountsAtOnce creates several containers concurrently, before any has the volume, and
// fails if they see different filesystems.
func mountsAtOnce(t *trial, f *fixture) {
	made := make([]*container, 4)
	var running errgroup.Group
	for i := range made {
		made[i] = newContainer(f.pod.n, fmt.Sprintf("at-once-%d", i))
		running.Go(func() error { return made[i].run(t.ctx, f.pod.containerSpec("at-once", []bind{all(f.vol)})) })
	}
	t.must(running.Wait())
	t.exec(made[0], "write", "/data/mark", "one")
	for _, c := range made {
		t.wantText(c, "/data/mark", "what each container reads", "one")
	}
}

func runLife(t *trial, s *suite) {
	f := newFixture(t, s.node, s.node.podUID())
	var c *container
	s.check(t, "life-container", func(t *trial) {
		c = f.container(t, "main")
		seesFilesystem(t, c)
		t.must(errors.Join(c.kill(t.ctx, unix.SIGKILL), c.remove(t.ctx)))
		_, err := f.vol.stats(t.ctx)
		t.that(err == nil, "when the pod's only container had ended: %w", err)
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
		if err := f.vol.socketAnswers(t.ctx, f.pod.sandbox.id); !errors.As(err, new(unsupported)) {
			t.must(err)
		}
	}, "life-again", "life-answer", "binding-program")
}
