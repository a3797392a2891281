package conformance

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
)

// manyCase has several volumes, several containers, and several attempts.
type manyCase struct{ f *fixture }

func runMany(ctx context.Context, s *suite) error {
	pod := s.node.podUID()
	disk, err := newDisk(ctx, s.node)
	if err != nil {
		return err
	}
	second, err := newVolume(s.node, disk, pod, "second")
	if err != nil {
		return err
	}
	second.published.MountFlags = []string{"noatime"}
	if err := second.publish(); err != nil {
		return err
	}
	f, err := newFixture(ctx, s.node, pod)
	if err != nil {
		return err
	}
	t := &manyCase{f: f}
	s.check(ctx, "mount-killed", func(ctx context.Context) error { return t.surviveKills(ctx) }, "mount-inside")
	s.check(ctx, "mount-two", func(ctx context.Context) error { return t.hasTwo(ctx, second) }, "mount-killed")
	s.check(ctx, "mount-options", func(ctx context.Context) error { return t.hasOption(ctx, second, "noatime") }, "mount-two")
	return runAtOnce(ctx, s)
}

// surviveKills kills the handler during create, each time a little later.
func (t *manyCase) surviveKills(ctx context.Context) error {
	for after := time.Millisecond; after < 300*time.Millisecond; after = after * 3 / 2 {
		c := newContainer(t.f.pod.n, "killed")
		short, cancel := context.WithTimeout(ctx, after)
		_, err := c.create(short, t.f.pod.containerSpec("killed", []bind{all(t.f.vol)}))
		ended := short.Err() == nil
		cancel()
		if ended {
			if err != nil {
				return err
			}
			break // it was sooner done than killed
		}
	}
	// A container runtime retries, too. The kernel unmounts what a killed attempt had
	// mounted some time after its end.
	var c *container
	err := eventually(ctx, endsWithin, func(ctx context.Context) (err error) {
		c, err = t.f.container(ctx, "main")
		return err
	})
	if err != nil {
		return err
	}
	return seesFilesystem(ctx, c)
}

// hasTwo runs a container with both volumes, and a sub-directory of the first one.
func (t *manyCase) hasTwo(ctx context.Context, second *testVolume) error {
	place, err := t.f.vol.bindSub("part")
	if err != nil {
		return err
	}
	c, err := t.f.pod.container(ctx, "two", all(t.f.vol), bind{source: second.target, at: "/other"}, bind{source: place, at: "/mnt"})
	if err != nil {
		return err
	}
	if err := c.execAll(ctx, []string{"write", "/other/mark", "second"}, []string{"write", "/mnt/mark", "part"}, []string{"write", "/data/mark", "first"}); err != nil {
		return err
	}
	for path, wanted := range map[string]string{"/data/mark": "first", "/other/mark": "second", "/mnt/mark": "part", "/data/part/mark": "part"} {
		if err := c.wantText(ctx, path, "what is in "+path, wanted); err != nil {
			return err
		}
	}
	return nil
}

// hasOption looks for an option of the mount in the container.
func (t *manyCase) hasOption(ctx context.Context, v *testVolume, option string) error {
	c, err := t.f.pod.container(ctx, "options", bind{source: v.target, at: "/data"})
	if err != nil {
		return err
	}
	text, err := c.exec(ctx, "read", "/proc/self/mountinfo")
	if err != nil {
		return err
	}
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) > 5 && fields[4] == "/data" && !strings.Contains(","+fields[5]+",", ","+option+",") {
			return fmt.Errorf("the option %s is not among those of the mount: %s", option, fields[5])
		}
	}
	return nil
}

// runAtOnce creates several containers concurrently, before any has the volume.
func runAtOnce(ctx context.Context, s *suite) error {
	f, err := newFixture(ctx, s.node, s.node.podUID())
	if err != nil {
		return err
	}
	s.check(ctx, "mount-at-once", func(ctx context.Context) error {
		const containers = 4
		ended := make(chan error, containers)
		made := make([]*container, containers)
		for i := range made {
			made[i] = newContainer(s.node, fmt.Sprintf("at-once-%d", i))
			bundle, err := made[i].prepare(f.pod.containerSpec("at-once", []bind{all(f.vol)}))
			if err != nil {
				return err
			}
			go func() { ended <- made[i].runPrepared(ctx, bundle) }()
		}
		var errs []error
		for range made {
			errs = append(errs, <-ended)
		}
		if err := errors.Join(errs...); err != nil {
			return err
		}
		return sameMount(ctx, made)
	}, "mount-inside")
	return nil
}

// sameMount fails if the containers see different filesystems.
func sameMount(ctx context.Context, containers []*container) error {
	if _, err := containers[0].exec(ctx, "write", "/data/mark", "one"); err != nil {
		return err
	}
	for _, c := range containers {
		if err := c.wantText(ctx, "/data/mark", "what each container reads", "one"); err != nil {
			return err
		}
	}
	return nil
}
