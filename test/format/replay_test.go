//go:build system

package format_test

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/disk/mkfs"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// A filesystem of a guest that was killed has a journal to replay. The kernel
// refuses to mount it from a device that is read-only; so nobody gets it like that.
func TestReadOnlyVolumeOfAKilledGuest(t *testing.T) {
	for _, fs := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fs, func(t *testing.T) {
			r := newFormatter(t)
			device, backing := r.blank()
			check.Must(t, check.Err(r.prepare(device, fs, volume.FormatHost, false)))
			look := func(device string) error {
				fd := openPath(t, device)
				defer func() { _ = unix.Close(fd) }()
				return r.f.CheckReplay(t.Context(), mkfs.Request{Device: fd, Volume: "/v", Path: device, FSType: fs})
			}
			check.NoError(t, look(device), "a new one")
			where := t.TempDir()
			mount := func(device string, flags uintptr) error { return unix.Mount(device, where, fs, flags, "") }
			unmount := func() {
				t.Helper()
				check.Must(t, unix.Unmount(where, 0))
			}
			killed := rig.Crashed(t, device, backing, fs, "data")
			check.NoError(t, look(device), "unmounted cleanly")

			readOnly := rig.Loop(t, killed, loopdev.Options{ReadOnly: true})
			check.Kind(t, look(readOnly), volume.InUse) // of a killed guest
			writable := rig.Loop(t, killed, loopdev.Options{})
			check.Must(t, mount(writable, 0))
			unmount()
			check.NoError(t, look(readOnly), "after it was mounted read-write once")
			if err := mount(readOnly, unix.MS_RDONLY); err != nil {
				t.Errorf("the kernel does not mount what was let pass: %v", err)
			} else {
				unmount()
			}
		})
	}
}

// A device can hang whoever reads it. Every other look then ends, and leaves nothing that hangs too.
func TestJournalsAreLookedAtOneByOne(t *testing.T) {
	r := newFormatter(t)
	device, _ := r.blank()
	check.Must(t, check.Err(r.prepare(device, "ext4", volume.FormatHost, false)))
	fd := openPath(t, device)
	defer func() { _ = unix.Close(fd) }()
	look := func() error {
		return r.f.CheckReplay(t.Context(), mkfs.Request{Device: fd, Volume: "/v", Path: device, FSType: "ext4"})
	}
	hanging := check.Value(os.OpenFile(r.conf.LockFile, os.O_RDWR, 0))(t)
	check.Must(t, unix.FcntlFlock(hanging.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK}))
	check.Kind(t, look(), volume.Busy) // beside a look that hangs
	check.Must(t, hanging.Close())
	check.Must(t, look())
}
