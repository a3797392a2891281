package claim

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestLoopDeviceThatCannotBeRead is a process without free descriptors: what a loop device
// has under it is not known then.
func TestLoopDeviceThatCannotBeRead(t *testing.T) {
	loop := volume.Device{Kind: volume.BlockDevice, Major: 7, Minor: 0, Path: "/dev/loop0"}
	v := &volume.Volume{Key: "k", Target: "/t", Device: loop}
	adopted := []*volume.Volume{{Target: "/other", Device: volume.Device{Path: "/dev/null"}}}
	c := newTable(t, nil, nil, &fakeOpeners{})
	check.WithoutDescriptors(t, func() {
		if err := c.users.RefuseAdopted(v, adopted); !errors.Is(err, unix.EMFILE) {
			t.Errorf("beside a volume of another program: %v", err)
		}
		if err := c.RefuseUsed(t.Context(), Request{Volume: v}, ReleaseTime); volume.KindOf(err) != volume.Busy {
			t.Errorf("a device that cannot be opened is free: %v", err)
		}
	})
}

// TestReadOnlyFlagThatCannotBeRestored: the release is repeated, or the device would stay
// read-only for its next volume.
func TestReadOnlyFlagThatCannotBeRestored(t *testing.T) {
	c := newTable(t, nil, nil, &fakeOpeners{})
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
	c := newTable(t, nil, nil, &fakeOpeners{})
	check.WithoutDescriptors(t, func() {
		if err := c.Reclaim(t.Context(), Request{Volume: v}); !errors.Is(err, unix.EMFILE) {
			t.Errorf("claimed again: %v", err)
		}
	})
	dev := &OpenedDevice{Device: other.Device, fd: sys.NoFD}
	if _, err := c.Begin(t.Context(), Request{Volume: other}, dev); volume.KindOf(err) != volume.InUse {
		t.Errorf("another volume claimed the device: %v", err)
	}
	check.Must(t, os.Remove(path))
	check.Must(t, c.Release(Request{Volume: v}, nil))
	if err := c.Reclaim(t.Context(), Request{Volume: v}); volume.KindOf(err) != volume.NotFound || len(c.owners.owned(v.Key)) > 0 {
		t.Errorf("an image that has gone: %v", err)
	}
}
