//go:build system

package fsops_test

import (
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/reference/fsops"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == watchdogMode {
		if err := fsops.Watch(os.Args[2:]); err != nil {
			os.Exit(1)
		}
		os.Exit(0)
	}
	if what := os.Getenv(asOther); what != "" {
		if err := other(what, os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(rig.Main(m))
}

const (
	mib  = int64(1) << 20
	size = 320 * mib // mkfs.xfs wants that much
)

var filesystems = []string{"ext4", "xfs", "btrfs"}

// filesystem is one on a loop device, mounted.
type filesystem struct {
	t      testing.TB
	kind   string
	device string
	dir    string // where it is mounted
	root   int    // only a place, as a new mount is
}

// newFilesystem mounts a new filesystem for the time of the test.
func newFilesystem(t testing.TB, kind string, bytes int64) *filesystem {
	t.Helper()
	return mounted(t, kind, rig.Disk(t, bytes, kind), 0, "")
}

func mounted(t testing.TB, kind, device string, flags uintptr, options string) *filesystem {
	t.Helper()
	f := &filesystem{t: t, kind: kind, device: device, dir: t.TempDir()}
	check.Must(t, unix.Mount(device, f.dir, kind, flags, options))
	f.root = check.Value(unix.Open(f.dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0))(t)
	t.Cleanup(f.unmount)
	return f
}

// unmount ends it before the test does.
func (f *filesystem) unmount() {
	f.t.Helper()
	if f.root >= 0 {
		check.Must(f.t, unix.Close(f.root))
		rig.UnmountAll(f.t, f.dir)
	}
	f.root = -1
}

func openFD(t testing.TB, path string, flags int) int {
	t.Helper()
	fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
	check.Require(t, err == nil, "open %v %v", path, err)
	t.Cleanup(func() { _ = unix.Close(fd) })
	return fd
}
