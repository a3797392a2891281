package conformance

import (
	"context"
	"errors"
	"fmt"
	"strconv"
)

// readOnly has a mount that is read-only, and then the volume.
func (s *suite) readOnly(ctx context.Context) error {
	st, err := s.set(ctx)
	if err != nil {
		return err
	}
	var writer, reader *container
	s.check(ctx, "ro-mount", func(ctx context.Context) (err error) {
		if writer, err = st.pod.container(ctx, "writer", all(st.vol)); err != nil {
			return err
		}
		reader, err = st.pod.container(ctx, "reader", bind{source: st.vol.target, at: "/data", readOnly: true})
		if err != nil {
			return err
		}
		return errors.Join(s.seesFilesystem(ctx, writer), reads(ctx, reader, "greeting", "hello"))
	}, "mount-inside")
	var c *container
	s.check(ctx, "ro-volume", func(ctx context.Context) (err error) {
		if err := st.turnReadOnly(ctx, writer, reader); err != nil {
			return err
		}
		if c, err = st.pod.container(ctx, "main", all(st.vol)); err != nil {
			return err
		}
		return reads(ctx, c, "greeting", "hello")
	}, "ro-mount")
	s.check(ctx, "ro-group", func(ctx context.Context) error { return st.keepsGroup(ctx, c) }, "ro-volume")
	s.check(ctx, "ro-sub", func(ctx context.Context) error { return st.refusesSub(ctx, "missing") }, "ro-volume")
	return nil
}

// turnReadOnly publishes the volume anew, for a new sandbox.
func (st *stage) turnReadOnly(ctx context.Context, containers ...*container) error {
	if err := st.again(ctx, containers...); err != nil {
		return err
	}
	if err := st.disk.setReadOnly(true); err != nil {
		return err
	}
	st.vol.said.ReadOnly, st.vol.said.Group = true, strconv.Itoa(podGroup)
	return st.vol.publish()
}

// keepsGroup fails where a read-only volume was given to the pod's group.
func (st *stage) keepsGroup(ctx context.Context, c *container) error {
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

// reads fails unless the container can read, and cannot write.
func reads(ctx context.Context, c *container, name, content string) error {
	text, err := c.exec(ctx, "read", "/data/"+name)
	if err != nil {
		return err
	}
	if err := want("what it reads", text, content); err != nil {
		return err
	}
	if _, err := c.exec(ctx, "write", "/data/"+name, "more"); err == nil {
		return errors.New("the container can write where it may only read")
	}
	return nil
}
