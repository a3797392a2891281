//go:build system

package format_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/mkfs"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// A filesystem of a guest that was killed has a journal to replay. The kernel
// refuses to mount it from a device that is read-only; so nobody gets it like that.
func TestReadOnlyVolumeOfAKilledGuest(t *testing.T) {
	for _, fs := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fs, func(t *testing.T) {
			r := newFormatter(t)
			device, backing := r.blank()
			if _, err := r.prepare(device, fs, volume.FormatHost, false); err != nil {
				t.Fatal(err)
			}
			check := func(device string) error {
				fd := openPath(t, device)
				defer func() { _ = unix.Close(fd) }()
				return r.f.CheckReplay(t.Context(), mkfs.Request{Device: fd, Volume: "/v", Path: device, FSType: fs})
			}
			if err := check(device); err != nil {
				t.Errorf("a new one: %v", err)
			}
			where := t.TempDir()
			mount := func(device string, flags uintptr) error { return unix.Mount(device, where, fs, flags, "") }
			unmount := func() {
				t.Helper()
				if err := unix.Unmount(where, 0); err != nil {
					t.Fatal(err)
				}
			}
			if err := mount(device, 0); err != nil {
				t.Fatal(err)
			}
			// The state of the disk in the moment when its guest is killed.
			killed := filepath.Join(t.TempDir(), "killed")
			for i := range 3 {
				writeSynced(t, filepath.Join(where, string(rune('a'+i))))
			}
			if out, err := exec.Command("cp", "--sparse=always", backing, killed).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			unmount()
			if err := check(device); err != nil {
				t.Errorf("unmounted cleanly: %v", err)
			}

			readOnly := rig.Loop(t, killed, loopdev.Options{ReadOnly: true})
			if err := mount(readOnly, unix.MS_RDONLY); err == nil {
				unmount()
				t.Fatal("the kernel mounts it: nothing is to be replayed")
			}
			err := check(readOnly)
			if volume.KindOf(err) != volume.InUse {
				t.Errorf("of a killed guest: %v", err)
			}
			writable := rig.Loop(t, killed, loopdev.Options{})
			if err := mount(writable, 0); err != nil {
				t.Fatal(err)
			}
			unmount()
			if err := check(readOnly); err != nil {
				t.Errorf("after it was mounted read-write once: %v", err)
			}
			if err := mount(readOnly, unix.MS_RDONLY); err != nil {
				t.Errorf("the kernel does not mount what was let pass: %v", err)
			} else {
				unmount()
			}
		})
	}
}

func writeSynced(t *testing.T, path string) {
	t.Helper()
	file, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	_, err = file.WriteString("data")
	if err == nil {
		err = file.Sync()
	}
	if err := file.Close(); err != nil {
		t.Fatal(err)
	}
	if err != nil {
		t.Fatal(err)
	}
}
