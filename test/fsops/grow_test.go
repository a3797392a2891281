//go:build system

package fsops_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/reference/fsops"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// growable is a device that a test can make larger.
func growable(t testing.TB, kind string, bytes int64, mkfs ...string) (device, image string) {
	t.Helper()
	image = rig.Image(t, bytes)
	rig.Mkfs(t, kind, image, mkfs...)
	return rig.Loop(t, image, loopdev.Options{}), image
}

func TestGrowsWhileAWriterWrites(t *testing.T) {
	for _, kind := range filesystems {
		t.Run(kind, func(t *testing.T) {
			device, image := growable(t, kind, size)
			f := mounted(t, kind, device, 0, "")
			fd := openFD(t, device, unix.O_RDONLY)
			has, err := fsops.Grow(f.root, fd, 0, 0)
			check.That(t, err == nil && has == size, "as large as the device: %d, %v", has, err)
			var busy sync.WaitGroup
			done, block := make(chan struct{}), bytes.Repeat([]byte("writer\n"), 16384)
			busy.Go(func() {
				for i := 0; ; i++ {
					select {
					case <-done:
						return
					default:
						err := os.WriteFile(filepath.Join(f.dir, strconv.Itoa(i%50)), block, 0o600)
						check.That(t, err == nil, "%v", err)
					}
				}
			})
			before := f.stat().Usage[0].Total
			rig.Enlarge(t, image, device, 3*size)
			has, err = fsops.Grow(f.root, fd, 2*size, 3*size)
			close(done)
			busy.Wait()
			if !rig.MayGrow(t, kind) {
				check.That(t, errors.Is(err, fsops.ErrDenied) && strings.Contains(err.Error(), "CAP_SYS_RESOURCE"), "without the capability: %v", err)
				return
			}
			check.Require(t, err == nil && has == 3*size, "%d bytes: %v", has, err)
			after := f.stat().Usage[0].Total
			check.That(t, after-before >= 19*size/10, "it grew from %d to %d bytes", before, after)
			has, err = fsops.Grow(f.root, fd, 3*size, 0)
			check.That(t, err == nil && has == 3*size, "again: %d, %v", has, err)
			for i := range 50 {
				got, err := os.ReadFile(filepath.Join(f.dir, strconv.Itoa(i)))
				check.That(t, err != nil || bytes.Equal(got, block), "file %d is not what was written", i)
			}
			f.unmount()
			whole(t, kind, device)
		})
	}
}

// whole checks a filesystem that is not mounted.
func whole(t testing.TB, kind, device string) {
	t.Helper()
	wantFree(t, device)
	rig.Fsck(t, kind, device)
}

func TestGrowIsRefusedBeforeAnythingChanges(t *testing.T) {
	for _, kind := range filesystems {
		device, image := growable(t, kind, size)
		f := mounted(t, kind, device, 0, "")
		fd := openFD(t, device, unix.O_RDONLY)
		rig.Enlarge(t, image, device, 2*size)
		before := f.stat().Usage[0].Total
		for _, limits := range [][2]int64{{2*size + 1, 0}, {0, 2*size - 1}, {size, size}} {
			check.Is(t, check.Err(fsops.Grow(f.root, fd, limits[0], limits[1])), fsops.ErrOutOfRange)
		}
		after := f.stat().Usage[0].Total
		check.That(t, after == before, "%s: it grew from %d to %d bytes", kind, before, after)
		wrong := openFD(t, rig.Disk(t, 4*size, ""), unix.O_RDONLY)
		if kind == "btrfs" {
			continue // of a single device it cannot tell: its own is not named for certain
		}
		check.Fails(t, check.Err(fsops.Grow(f.root, wrong, 0, 0)), "it lies on the device")
	}
}

func TestGrowOfAReadOnlyMount(t *testing.T) {
	device, image := growable(t, "xfs", size)
	f := mounted(t, "xfs", device, unix.MS_RDONLY, "")
	rig.Enlarge(t, image, device, 2*size)
	check.Is(t, check.Err(fsops.Grow(f.root, openFD(t, device, unix.O_RDONLY), 0, 0)), unix.EROFS)
}

func TestOtherFilesystemsDoNotGrow(t *testing.T) {
	dir := rig.Tmpfs(t, "size=1m")
	root, device := openFD(t, dir, unix.O_PATH), openFD(t, rig.Disk(t, mib, ""), unix.O_RDONLY)
	check.Is(t, check.Err(fsops.Grow(root, device, 0, 0)), fsops.ErrUnsupported)
}

// extBytes is the size of an ext4 in bytes, as its own tool tells it.
func extBytes(t testing.TB, device string) (bytes int64) {
	t.Helper()
	bytes = 1
	for line := range strings.SplitSeq(rig.Command(t, "dumpe2fs", "-h", device), "\n") {
		name, value, _ := strings.Cut(line, ":")
		if name == "Block count" || name == "Block size" {
			bytes *= check.Value(strconv.ParseInt(strings.TrimSpace(value), 10, 64))(t)
		}
	}
	return bytes
}

func TestGrowUnmounted(t *testing.T) {
	// Sizes whose last group is whole, too small for its tables, and just large enough.
	sizes := []int64{2 * size, 384 * mib, 384*mib + 4096, 384*mib + mib, 385*mib + 512, 391 * mib, 640*mib + 3*mib, 800 * mib}
	for _, mkfs := range [][]string{nil, {"-b", "1024"}, {"-O", "^64bit,^resize_inode"}} {
		for _, bytes := range rig.Sample(sizes, 3) {
			device, image := growable(t, "ext4", 256*mib, mkfs...)
			rig.Enlarge(t, image, device, bytes)
			ctx, cancel := context.WithTimeout(t.Context(), 60e9)
			check.Must(t, fsops.GrowUnmounted(ctx, device, "ext4"))
			cancel()
			has := extBytes(t, device)
			check.That(t, has >= 256*mib && has <= bytes && bytes-has <= 9*mib, "mkfs %q: %d of %d bytes", mkfs, has, bytes)
			// What e2fsprogs leave unused is known: no second check of the filesystem.
			f := mounted(t, "ext4", device, 0, "")
			before := f.stat().Usage[0].Total
			_, err := fsops.Grow(f.root, openFD(t, device, unix.O_RDONLY), 0, 0)
			after := f.stat().Usage[0].Total
			check.That(t, err == nil && after == before, "mkfs %q: %d of %d bytes: it still needed to grow: %v", mkfs, has, bytes, err)
			f.unmount()
			whole(t, "ext4", device)
		}
	}
}

func TestGrowUnmountedLeavesOthersAlone(t *testing.T) {
	for _, kind := range []string{"xfs", "btrfs", ""} {
		device := rig.Disk(t, size, kind)
		err := fsops.GrowUnmounted(t.Context(), device, "ext4")
		check.That(t, kind != "" || err == nil, "a blank device: %v", err)
		check.Must(t, fsops.GrowUnmounted(t.Context(), device, kind))
		if kind != "" {
			whole(t, kind, device)
		}
	}
}

func TestGrowUnmountedByDescriptor(t *testing.T) {
	device, image := growable(t, "ext4", 64*mib)
	rig.Enlarge(t, image, device, 128*mib)
	fd := openFD(t, device, unix.O_RDWR)
	check.Must(t, fsops.GrowUnmounted(t.Context(), "/proc/"+strconv.Itoa(os.Getpid())+"/fd/"+strconv.Itoa(fd), "ext4"))
	has := extBytes(t, device)
	check.That(t, has == 128*mib, "%d bytes", has)
}

func TestGrowUnmountedOfADamagedOne(t *testing.T) {
	device, image := growable(t, "ext4", 64*mib)
	// Beyond what e2fsck mends without asking.
	rig.Command(t, "debugfs", "-w", "-R", "clri <2>", device)
	rig.Enlarge(t, image, device, 128*mib)
	check.Fails(t, fsops.GrowUnmounted(t.Context(), device, "ext4"), "check the filesystem of "+device)
	has := extBytes(t, device)
	check.That(t, has == 64*mib, "%d bytes", has)
}
