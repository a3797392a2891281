package conformance

import (
	"context"
	"errors"
	"fmt"
	"strconv"
)

// readOnlyCase makes one mount read-only, and then the whole volume.
type readOnlyCase struct{ f *fixture }

func runReadOnly(ctx context.Context, s *suite) error {
	f, err := newFixture(ctx, s.node, s.node.podUID())
	if err != nil {
		return err
	}
	t := &readOnlyCase{f: f}
	var writer, reader *container
	s.check(ctx, "ro-mount", func(ctx context.Context) (err error) {
		if writer, err = t.f.container(ctx, "writer"); err != nil {
			return err
		}
		reader, err = t.f.pod.container(ctx, "reader", bind{source: t.f.vol.target, at: "/data", readOnly: true})
		if err != nil {
			return err
		}
		return errors.Join(seesFilesystem(ctx, writer), reads(ctx, reader, "greeting", "hello"))
	}, "mount-inside")
	var c *container
	s.check(ctx, "ro-volume", func(ctx context.Context) (err error) {
		if err := t.turnReadOnly(ctx, writer, reader); err != nil {
			return err
		}
		if c, err = t.f.container(ctx, "main"); err != nil {
			return err
		}
		return reads(ctx, c, "greeting", "hello")
	}, "ro-mount")
	s.check(ctx, "ro-group", func(ctx context.Context) error { return t.keepsGroup(ctx, c) }, "ro-volume")
	s.check(ctx, "ro-sub", func(ctx context.Context) error { return t.f.refusesSub(ctx, "missing") }, "ro-volume")
	return nil
}

// turnReadOnly publishes the volume again, read-only, for a new sandbox.
func (t *readOnlyCase) turnReadOnly(ctx context.Context, containers ...*container) error {
	if err := t.f.restartPod(ctx, containers...); err != nil {
		return err
	}
	if err := t.f.disk.setReadOnly(true); err != nil {
		return err
	}
	t.f.vol.published.ReadOnly, t.f.vol.published.Group = true, strconv.Itoa(podGroup)
	return t.f.vol.publish()
}

// keepsGroup fails if a read-only volume was given to the pod's group.
func (t *readOnlyCase) keepsGroup(ctx context.Context, c *container) error {
	found, err := ask[map[string]seen](ctx, c, "look", "/data", "/data/greeting")
	if err != nil {
		return err
	}
	for path, is := range found {
		if is.GID == podGroup {
			return fmt.Errorf("%s of the read-only volume is %v", path, is)
		}
	}
	return nil
}

// reads fails unless the container can read the file and cannot write to it.
func reads(ctx context.Context, c *container, name, content string) error {
	if err := c.wantText(ctx, "/data/"+name, "what it reads", content); err != nil {
		return err
	}
	if _, err := c.exec(ctx, "write", "/data/"+name, "more"); err == nil {
		return errors.New("the container can write where it may only read")
	}
	return nil
}
