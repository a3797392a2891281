package conformance

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
)

// runMany has several volumes, several containers, and several attempts.
func runMany(t *trial, s *suite) {
	uid := s.node.podUID()
	second := newVolume(t, s.node, newDisk(t, s.node), uid, "second")
	second.published.MountFlags = mountOptions
	t.must(second.publish())
	f := newFixture(t, s.node, uid)
	s.check(t, "mount-killed", func(t *trial) { surviveKills(t, f) }, "mount-inside")
	s.check(t, "mount-two", func(t *trial) { hasTwo(t, f, second) }, "mount-killed")
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
	t.must(eventually(t.ctx, endsWithin, func(ctx context.Context) (err error) {
		c, err = f.pod.container(ctx, "main", all(f.vol))
		return err
	}))
	seesFilesystem(t, c)
}

// hasTwo runs a container with both volumes and a sub-directory of the first one.
func hasTwo(t *trial, f *fixture, second *testVolume) {
	place := f.vol.bindSub(t, "part")
	c := t.container(f.pod, "two", all(f.vol), bind{source: second.target, at: "/other"}, bind{source: place, at: "/mnt"})
	t.exec(c, "write", "/other/mark", "second")
	t.exec(c, "write", "/mnt/mark", "part")
	t.exec(c, "write", "/data/mark", "first")
	for path, wanted := range map[string]string{"/data/mark": "first", "/other/mark": "second", "/mnt/mark": "part", "/data/part/mark": "part"} {
		t.wantText(c, path, "what is in "+path, wanted)
	}
}

// mountOptions are options of the mount, which a runtime can lose when it binds the mount.
var mountOptions = []string{"noatime", "nosuid", "nodev", "noexec"}

// hasOptions fails unless the container's mount has the options.
func hasOptions(t *trial, f *fixture, b bind) {
	c := t.container(f.pod, "options", b)
	var has []string
	for line := range strings.Lines(t.exec(c, "read", "/proc/self/mountinfo")) {
		if fields := strings.Fields(line); len(fields) > 5 && fields[4] == b.at {
			has = strings.Split(fields[5], ",")
		}
	}
	for _, option := range mountOptions {
		if !slices.Contains(has, option) {
			t.must(fmt.Errorf("the option %s is not among those of the mount: %s", option, has))
		}
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
