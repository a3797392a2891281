package claim

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/sys"
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

// TestReadOnlyFlagThatCannotBeRestored: the release is repeated, or the device would stay
// read-only for its next volume.
func TestReadOnlyFlagThatCannotBeRestored(t *testing.T) {
	c := NewTable(nil, nil, nil)
	t.Cleanup(c.Close)
	device := volume.Device{Kind: volume.BlockDevice, Major: 240, Minor: 77, Path: "/dev/null"}
	r := Request{Volume: &volume.Volume{Key: volume.KeyOf("/a"), Target: "/a", ReadOnly: true, Device: device}}
	check.WithoutDescriptors(t, func() {
		if err := c.Release(r, nil); !errors.Is(err, unix.EMFILE) {
			t.Errorf("released: %v", err)
		}
	})
	for _, path := range []string{"/dev/null", "/dev/there-is-no-such-device"} {
		r.Device.Path = path
		check.Must(t, c.Release(r, nil)) // that device has gone
	}
}

// TestDeviceThatCannotBeOpenedStaysOwned is a restart without free descriptors: a sandbox of
// the volume may still have its device.
func TestDeviceThatCannotBeOpenedStaysOwned(t *testing.T) {
	path := filepath.Join(t.TempDir(), "image")
	check.Must(t, os.WriteFile(path, []byte("x"), 0o600))
	v := &volume.Volume{Key: volume.KeyOf("/a"), Target: "/a", Device: Identify(path)}
	other := &volume.Volume{Key: volume.KeyOf("/b"), Target: "/b", Device: v.Device}
	c := NewTable(nil, nil, nil)
	t.Cleanup(c.Close)
	check.WithoutDescriptors(t, func() {
		if err := c.Reclaim(t.Context(), Request{Volume: v}); !errors.Is(err, unix.EMFILE) {
			t.Errorf("claimed again: %v", err)
		}
	})
	dev := &OpenedDevice{Device: other.Device, fd: sys.NoFD}
	if _, err := c.Acquire(t.Context(), Request{Volume: other}, dev, nil); volume.KindOf(err) != volume.InUse {
		t.Errorf("another volume claimed the device: %v", err)
	}
	check.Must(t, os.Remove(path))
	check.Must(t, c.Release(Request{Volume: v}, nil))
	if err := c.Reclaim(t.Context(), Request{Volume: v}); volume.KindOf(err) != volume.NotFound || len(c.owners.owned(v.Key)) > 0 {
		t.Errorf("an image that has gone: %v", err)
	}
}
