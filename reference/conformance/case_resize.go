package conformance

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// resizeCase grows a volume that is in use.
type resizeCase struct{ f *fixture }

func runResize(ctx context.Context, s *suite) error {
	f, err := newFixture(ctx, s.node, s.node.podUID())
	if err != nil {
		return err
	}
	t := &resizeCase{f: f}
	var c *container
	s.check(ctx, "resize-again", func(ctx context.Context) (err error) {
		if c, err = t.f.container(ctx, "main"); err != nil {
			return err
		}
		return errors.Join(seesFilesystem(ctx, c), t.resizesTo(ctx, 0, diskSize), t.resizesTo(ctx, diskSize, diskSize))
	}, "mount-inside", "binding-program", "mount-grown")
	s.check(ctx, "resize-far", func(ctx context.Context) error {
		return t.f.vol.wantExit(ctx, abi.ExitOutOfRange, abi.Resize, t.f.vol.target, strconv.Itoa(diskSize+1), "0")
	}, "resize-again")
	s.check(ctx, "resize-online", func(ctx context.Context) error {
		if err := t.f.disk.grow(); err != nil {
			return err
		}
		writer := startProbe(ctx, c, "churn", "/data/churn")
		if err := errors.Join(t.resizesTo(ctx, grownSize, grownSize), writer.ends(ctx, churnTime+lateBy)); err != nil {
			return err
		}
		if err := t.f.isLarger(ctx, c, diskSize); err != nil {
			return err
		}
		return c.wantText(ctx, "/data/greeting", "a file that was there before", "hello")
	}, "resize-again")
	s.check(ctx, "resize-limit", func(ctx context.Context) error {
		return t.f.vol.wantExit(ctx, abi.ExitOutOfRange, abi.Resize, t.f.vol.target, "0", strconv.Itoa(madeSize))
	}, "resize-again")
	return nil
}

// resizesTo fails unless the answer is the size of the device.
func (t *resizeCase) resizesTo(ctx context.Context, least, size int64) error {
	got, err := t.f.vol.resize(ctx, least, 0)
	if err == nil && got != size {
		err = fmt.Errorf("it answers with a capacity of %d bytes, and the device that it should fill has %d", got, size)
	}
	return err
}
