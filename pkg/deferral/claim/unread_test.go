package claim

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestLoopDeviceThatCannotBeRead is a process without free descriptors: what a loop device
// has under it, and whether it is in use, is not known then.
func TestLoopDeviceThatCannotBeRead(t *testing.T) {
	loop := volume.Device{Kind: volume.BlockDevice, Major: loopMajor, Minor: 0, Path: "/dev/loop0"}
	v := &volume.Volume{Target: "/t", Device: loop}
	adopted := []*volume.Volume{{Target: "/other", Device: volume.Device{Path: "/dev/null"}}}
	check.WithoutDescriptors(t, func() {
		if data, err := dataOf(loop); !errors.Is(err, unix.EMFILE) {
			t.Errorf("the data of the device is %v, %v", data, err)
		}
		if err := RefuseAdopted(v, adopted); !errors.Is(err, unix.EMFILE) {
			t.Errorf("beside a volume of another program: %v", err)
		}
		if err := refuseInUse(v, loop); !errors.Is(err, unix.EMFILE) {
			t.Errorf("another loop device counts as free: %v", err)
		}
	})
	for _, path := range []string{"/dev/there-is-no-such-loop", "/dev/null"} {
		gone := loop
		gone.Path = path
		if data, err := dataOf(gone); err != nil || len(data) != 1 {
			t.Errorf("a device that has gone has %v, %v", data, err)
		}
	}
}
