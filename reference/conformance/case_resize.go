package conformance

import (
	"fmt"
	"strconv"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// runResize grows a volume that is in use.
func runResize(t *trial, s *suite) {
	f := newFixture(t, s.node, s.node.podUID())
	var c *container
	s.check(t, "resize-again", func(t *trial) {
		c = f.container(t, "main")
		seesFilesystem(t, c)
		resizesTo(t, f, 0, diskSize)
		resizesTo(t, f, diskSize, diskSize)
	}, "mount-inside", "binding-program", "mount-grown")
	s.check(t, "resize-far", func(t *trial) {
		t.must(f.vol.wantExit(t.ctx, abi.ExitOutOfRange, abi.Resize, f.vol.target, strconv.Itoa(diskSize+1), "0"))
	}, "resize-again")
	s.check(t, "resize-online", func(t *trial) {
		t.must(f.disk.grow())
		writer := startProbe(t.ctx, c, "churn", "/data/churn")
		resizesTo(t, f, grownSize, grownSize)
		t.must(writer.ends(t.ctx, handlerTimeout))
		isLarger(t, c, diskSize)
		t.wantText(c, "/data/greeting", "a file that was there before", "hello")
	}, "resize-again")
	s.check(t, "resize-limit", func(t *trial) {
		t.must(f.vol.wantExit(t.ctx, abi.ExitOutOfRange, abi.Resize, f.vol.target, "0", strconv.Itoa(madeSize)))
	}, "resize-again")
}

// resizesTo fails unless the answer is the size of the device.
func resizesTo(t *trial, f *fixture, least, size int64) {
	got, err := f.vol.resize(t.ctx, least, 0)
	if err == nil && got != size {
		err = fmt.Errorf("it answers with a capacity of %d bytes, and the device that it should fill has %d", got, size)
	}
	t.must(err)
}
