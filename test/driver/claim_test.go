//go:build system

package driver_test

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// TestDeferredPublishAgain repeats a publish while the device is claimed, as
// kubelet does after a restart: also through a restart of the driver.
func TestDeferredPublishAgain(t *testing.T) {
	r := newDriver(t, true)
	v := r.volume("claimed", rig.MountAccess("ext4"))
	v.must(v.create, v.stage)
	publish := func() string {
		t.Helper()
		req := v.request()
		csidefer.SetRequested(req)
		reply, err := v.NodePublishVolume(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		mount, given, err := csidefer.DeferredMount(reply)
		if err != nil || !given {
			t.Fatalf("given %v, %v", given, err)
		}
		return mount.GetVolumeBackingPath()
	}
	device := publish()
	claim, err := unix.Open(device, unix.O_RDWR|unix.O_EXCL|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(claim) }()
	if again := publish(); again != device {
		t.Errorf("%s instead of %s", again, device)
	}
	r.restart()
	if again := publish(); again != device {
		t.Errorf("after a restart: %s instead of %s", again, device)
	}
	// The claim ends before the driver unpublishes.
	if err := unix.Close(claim); err != nil {
		t.Fatal(err)
	}
	claim = -1
	v.down()
	r.wantNothing()
}
