package conformance

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
)

// many has several volumes, several containers, and several attempts.
func (s *suite) many(ctx context.Context) error {
	pod := s.node.podUID()
	disk, err := s.node.newDisk(ctx)
	if err != nil {
		return err
	}
	second, err := s.node.newNamedVolume(disk, pod, "second")
	if err != nil {
		return err
	}
	second.said.MountFlags = []string{"noatime"}
	if err := second.publish(); err != nil {
		return err
	}
	st, err := s.setFor(ctx, pod)
	if err != nil {
		return err
	}
	s.check(ctx, "mount-killed", func(ctx context.Context) error { return st.surviveKills(ctx, s) }, "mount-inside")
	s.check(ctx, "mount-two", func(ctx context.Context) error { return st.hasTwo(ctx, second) }, "mount-killed")
	s.check(ctx, "mount-options", func(ctx context.Context) error { return st.hasOption(ctx, second, "noatime") }, "mount-two")
	return s.atOnce(ctx)
}

// surviveKills kills the handler at more and more distant moments of a create.
func (st *stage) surviveKills(ctx context.Context, s *suite) error {
	for after := time.Millisecond; after < 300*time.Millisecond; after = after * 3 / 2 {
		c := &container{n: st.pod.n, id: st.pod.n.id("killed")}
		short, cancel := context.WithTimeout(ctx, after)
		_, err := c.create(short, st.pod.containerSpec("killed", []bind{all(st.vol)}))
		ended := short.Err() == nil
		cancel()
		if ended {
			if err != nil {
				return err
			}
			break // it was sooner done than killed
		}
	}
	c, err := st.pod.container(ctx, "main", all(st.vol))
	if err != nil {
		return err
	}
	return s.seesFilesystem(ctx, c)
}

// hasTwo runs a container with both volumes, and a sub-directory of the first one.
func (st *stage) hasTwo(ctx context.Context, second *volume) error {
	place, err := st.vol.bindSub("part")
	if err != nil {
		return err
	}
	c, err := st.pod.container(ctx, "two", all(st.vol), bind{source: second.target, at: "/other"}, bind{source: place, at: "/mnt"})
	if err != nil {
		return err
	}
	for _, words := range [][]string{{"write", "/other/mark", "second"}, {"write", "/mnt/mark", "part"}, {"write", "/data/mark", "first"}} {
		if _, err := c.exec(ctx, words...); err != nil {
			return err
		}
	}
	for path, wanted := range map[string]string{"/data/mark": "first", "/other/mark": "second", "/mnt/mark": "part", "/data/part/mark": "part"} {
		text, err := c.exec(ctx, "read", path)
		if err != nil {
			return err
		}
		if err := want("what is in "+path, text, wanted); err != nil {
			return err
		}
	}
	return nil
}

// hasOption looks for an option of the mount in the container.
func (st *stage) hasOption(ctx context.Context, v *volume, option string) error {
	c, err := st.pod.container(ctx, "options", bind{source: v.target, at: "/data"})
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

// atOnce creates containers at the same time, of which none has the volume yet.
func (s *suite) atOnce(ctx context.Context) error {
	st, err := s.set(ctx)
	if err != nil {
		return err
	}
	s.check(ctx, "mount-at-once", func(ctx context.Context) error {
		const containers = 4
		ended := make(chan error, containers)
		made := make([]*container, containers)
		for i := range made {
			made[i] = &container{n: s.node, id: s.node.id(fmt.Sprintf("at-once-%d", i))}
			bundle, err := made[i].prepare(st.pod.containerSpec("at-once", []bind{all(st.vol)}))
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

// sameMount fails where the containers see different filesystems.
func sameMount(ctx context.Context, containers []*container) error {
	if _, err := containers[0].exec(ctx, "write", "/data/mark", "one"); err != nil {
		return err
	}
	for _, c := range containers {
		text, err := c.exec(ctx, "read", "/data/mark")
		if err != nil {
			return err
		}
		if err := want("what each container reads", text, "one"); err != nil {
			return err
		}
	}
	return nil
}
