package claim

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestLoopDeviceThatCannotBeOpened is a process without free descriptors: whether the kernel
// has a second way to the data in use is not known then.
func TestLoopDeviceThatCannotBeOpened(t *testing.T) {
	loop := volume.Device{Kind: volume.BlockDevice, Major: loopMajor, Minor: 0, Path: "/dev/loop0"}
	v := &volume.Volume{Target: "/t", Device: loop}
	check.WithoutDescriptors(t, func() {
		if err := refuseInUse(v, loop); !errors.Is(err, unix.EMFILE) {
			t.Errorf("it counts as free: %v", err)
		}
	})
	loop.Path = "/dev/there-is-no-such-loop"
	if err := refuseInUse(v, loop); err != nil {
		t.Errorf("one that has gone: %v", err)
	}
}
