package rig

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/reference/fsops"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// MakeMountsPrivate keeps what is mounted in this mount namespace from all others.
func MakeMountsPrivate() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	return nil
}

// Mounts lists the mounts of this namespace at and below a directory.
func Mounts(dir string) []*mountinfo.Info {
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(strings.TrimSuffix(dir, "/")))
	if err != nil {
		return []*mountinfo.Info{{Mountpoint: err.Error()}}
	}
	return mounts
}

// MountsOf lists the mounts of this namespace that have a source, such as a device.
func MountsOf(source string) []*mountinfo.Info {
	return slices.DeleteFunc(Mounts("/"), func(m *mountinfo.Info) bool { return m.Source != source })
}

// MountPoints lists the mount points at and below a directory.
func MountPoints(dir string) (points []string) {
	for _, m := range Mounts(dir) {
		points = append(points, m.Mountpoint)
	}
	return points
}

// Unmount unmounts everything at and below a directory.
func Unmount(dir string) error {
	var problems []error
	for _, point := range slices.Backward(MountPoints(dir)) {
		// EINVAL: it went with the mount above it.
		if err := unix.Unmount(point, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
			problems = append(problems, fmt.Errorf("unmount %s: %w", point, err))
		}
	}
	return errors.Join(problems...)
}

// MountAside mounts a filesystem where no list of mounts shows it: whoever has the file has
// the mount, and with the last descriptor it goes.
func MountAside(device, fs string, options ...string) (*os.File, error) {
	root, err := fsops.NewMount(fs, device, options, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(root), device), nil
}

// Pool mounts a disk for a driver's images, for the time of the test.
func Pool(t T, fs, disk string) string {
	t.Helper()
	dir := t.TempDir()
	check.Must(t, unix.Mount(disk, dir, fs, 0, ""))
	t.Cleanup(func() {
		// The last loop device over the images is no longer listed a moment before the kernel closes its file.
		err := check.Until(30*time.Second, 10*time.Millisecond, func() error { return unix.Unmount(dir, 0) })
		check.Require(t, err == nil, "unmount %s: %v", dir, err)
	})
	return dir
}

// Loops maps the loop devices of the machine over files whose path contains a text to those paths.
func Loops(text string) map[string]string {
	found := make(map[string]string)
	files, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, file := range files {
		raw, err := os.ReadFile(file) //nolint:gosec // a file of the kernel's
		if err == nil && strings.Contains(string(raw), text) {
			found["/dev/"+filepath.Base(filepath.Dir(filepath.Dir(file)))] = strings.TrimSpace(string(raw))
		}
	}
	return found
}

// LoopsLeft lists the loop devices that stay over files whose path contains a text. The kernel detaches one at its last
// close, and a crust-proxy of another test, which looks at all loop devices, has each open for a moment.
func LoopsLeft(text string) []string {
	return check.Left(30*time.Second, 10*time.Millisecond, func() []string { return slices.Sorted(maps.Keys(Loops(text))) })
}

// Enlarge makes a loop device and the image under it larger, as a storage system does.
func Enlarge(t T, image, device string, bytes int64) {
	t.Helper()
	check.Must(t, errors.Join(os.Truncate(image, bytes), loopdev.Grow(device)))
}

// Exclusive opens a device as its only owner for a moment. The error is EBUSY if it is mounted or claimed.
func Exclusive(device string) error {
	fd, err := unix.Open(device, unix.O_RDONLY|unix.O_EXCL|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// TryWrite writes to the first byte of a device, as a program on the host would.
func TryWrite(device string) error {
	fd, err := unix.Open(device, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	_, err = unix.Pwrite(fd, []byte("x"), 0)
	return errors.Join(err, unix.Close(fd))
}

// DetachLoops detaches the loop devices over files whose path contains a text.
func DetachLoops(text string) error {
	var problems []error
	for device, file := range Loops(text) {
		problems = append(problems, detachOver(device, file))
	}
	return errors.Join(problems...)
}

// detachOver frees a loop device that was found over a file, if it still is.
func detachOver(device, file string) error {
	return DetachIf(device, func(*os.File) bool { return Loops(file)[device] == file })
}

// DetachIf frees a loop device if it is the one that is meant, which nobody can change while it is open.
func DetachIf(device string, meant func(loop *os.File) bool) error {
	loop, err := os.Open(device) //nolint:gosec // the kernel's name
	if err != nil {
		return err
	}
	defer func() { _ = loop.Close() }()
	if !meant(loop) {
		return nil
	}
	return loopdev.Detach(device)
}

// generationOf is another number each time that a disk gets or loses its contents; "" where the kernel does not tell.
func generationOf(device string) string {
	raw, _ := os.ReadFile("/sys/block/" + filepath.Base(device) + "/diskseq") //nolint:gosec // a file of the kernel's
	return string(raw)
}
