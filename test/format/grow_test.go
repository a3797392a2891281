//go:build system

package format_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/mkfs"
	"github.com/crust-proxy/crust-proxy/internal/superblock"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// smallOnLarge is a device of 300 MiB with an ext4 of 100 MiB and a file on it, as a
// snapshot restored into a larger volume is. prepare works on the image before.
func smallOnLarge(t *testing.T, prepare ...string) (device string) {
	t.Helper()
	backing := rig.Image(t, 100*mib)
	rig.Mkfs(t, "ext4", backing)
	run(t, "", "debugfs", "-w", "-R", "write /etc/hostname kept", backing)
	for _, command := range prepare {
		run(t, "", "debugfs", "-w", "-R", command, backing)
	}
	if err := os.Truncate(backing, size); err != nil {
		t.Fatal(err)
	}
	return rig.Loop(t, backing, loopdev.Options{})
}

// bytesOf mounts the filesystem and gives its size, and whether the file is there.
func bytesOf(t *testing.T, device string) int64 {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount(device, dir, "ext4", 0, ""); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Unmount(dir, 0) }()
	if _, err := os.Stat(filepath.Join(dir, "kept")); err != nil {
		t.Error(err)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		t.Fatal(err)
	}
	return int64(st.Blocks) * st.Bsize
}

func (r *testFormatter) growing(device string, change func(*mkfs.Request)) error {
	fd := openPath(r.t, device)
	defer func() { _ = unix.Close(fd) }()
	request := mkfs.Request{Device: fd, Volume: "/v", Path: device, FSType: "ext4", Policy: volume.FormatNever, Grow: true}
	change(&request)
	_, err := r.f.Prepare(r.t.Context(), request)
	return err
}

func TestARestoredFilesystemIsGrownBeforeItIsHandedOver(t *testing.T) {
	rig.Need(t, "e2fsck", "resize2fs", "debugfs")
	r := newFormatter(t)
	device := smallOnLarge(t)
	if err := r.growing(device, func(*mkfs.Request) {}); err != nil {
		t.Fatal(err)
	}
	if got := bytesOf(t, device); got < 250*mib {
		t.Errorf("the filesystem has %d bytes, its device %d", got, size)
	}
	if out, err := exec.Command("e2fsck", "-f", "-n", device).CombinedOutput(); err != nil {
		t.Errorf("e2fsck: %v: %s", err, out)
	}
}

func TestWhatMustNotBeGrownStaysAsItIs(t *testing.T) {
	rig.Need(t, "e2fsck", "resize2fs", "debugfs")
	for name, change := range map[string]func(*mkfs.Request){
		"a rule says so":     func(q *mkfs.Request) { q.Grow = false },
		"a read-only volume": func(q *mkfs.Request) { q.ReadOnly = true },
	} {
		t.Run(name, func(t *testing.T) {
			device := smallOnLarge(t)
			if err := newFormatter(t).growing(device, change); err != nil {
				t.Fatal(err)
			}
			if got := bytesOf(t, device); got > 100*mib {
				t.Errorf("it was grown to %d bytes", got)
			}
		})
	}
}

// TestADamagedFilesystemKeepsNoPodWaiting: what e2fsck does not repair by itself is
// handed over as it is.
func TestADamagedFilesystemKeepsNoPodWaiting(t *testing.T) {
	rig.Need(t, "e2fsck", "resize2fs", "debugfs")
	device := smallOnLarge(t, "clri <2>") // no root directory
	if err := newFormatter(t).growing(device, func(*mkfs.Request) {}); err != nil {
		t.Fatalf("a filesystem that cannot be grown is refused: %v", err)
	}
	file, err := os.Open(device)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	super, err := superblock.Read(file, "ext4")
	if err != nil || super.Bytes > 100*mib {
		t.Errorf("it was grown: %+v, %v", super, err)
	}
}

// TestACheckThatTakesTooLongIsEnded: e2fsck parses what a tenant wrote.
func TestACheckThatTakesTooLongIsEnded(t *testing.T) {
	rig.Need(t, "resize2fs", "debugfs")
	tools := t.TempDir()
	for _, name := range []string{"blkid", "resize2fs"} {
		path, err := exec.LookPath(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(path, filepath.Join(tools, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(tools, "e2fsck"), []byte("#!/bin/sh\nexec sleep 600\n"), 0o755); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	r := newFormatter(t, func(c *mkfs.Config) { c.ToolDirs, c.Timeout = []string{tools}, 6*time.Second })
	device := smallOnLarge(t)
	began := time.Now()
	if err := r.growing(device, func(*mkfs.Request) {}); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took < 2*time.Second {
		t.Errorf("e2fsck was not waited for: %v", took)
	}
	if got := bytesOf(t, device); got > 100*mib {
		t.Errorf("it was grown to %d bytes without a check", got)
	}
}
