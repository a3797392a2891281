package conformance

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// resize grows a volume that is in use.
func (s *suite) resize(ctx context.Context) error {
	st, err := s.set(ctx)
	if err != nil {
		return err
	}
	var c *container
	s.check(ctx, "resize-again", func(ctx context.Context) (err error) {
		if c, err = st.pod.container(ctx, "main", all(st.vol)); err != nil {
			return err
		}
		return errors.Join(s.seesFilesystem(ctx, c), st.resizesTo(ctx, 0, diskSize), st.resizesTo(ctx, diskSize, diskSize))
	}, "mount-inside", "binding-program", "mount-grown")
	s.check(ctx, "resize-far", func(ctx context.Context) error {
		return st.vol.wantExit(ctx, abi.ExitOutOfRange, abi.Resize, st.vol.target, strconv.Itoa(diskSize+1), "0")
	}, "resize-again")
	s.check(ctx, "resize-online", func(ctx context.Context) error {
		if err := st.disk.grow(); err != nil {
			return err
		}
		writer := c.aside(ctx, "churn", "/data/churn")
		if err := errors.Join(st.resizesTo(ctx, grownSize, grownSize), writer.ends(ctx, churnTime+lateBy)); err != nil {
			return err
		}
		if err := st.isLarger(ctx, c, diskSize); err != nil {
			return err
		}
		text, err := c.exec(ctx, "read", "/data/greeting")
		if err != nil {
			return err
		}
		return want("a file that was there before", text, "hello")
	}, "resize-again")
	s.check(ctx, "resize-limit", func(ctx context.Context) error {
		return st.vol.wantExit(ctx, abi.ExitOutOfRange, abi.Resize, st.vol.target, "0", strconv.Itoa(madeSize))
	}, "resize-again")
	return nil
}

// resizesTo fails unless the answer is the size of the device.
func (st *stage) resizesTo(ctx context.Context, least, size int64) error {
	got, err := st.vol.resize(ctx, least, 0)
	if err == nil && got != size {
		err = fmt.Errorf("it answers with a capacity of %d bytes, and the device that it should fill has %d", got, size)
	}
	return err
}
