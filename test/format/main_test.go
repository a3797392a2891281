//go:build system

package format_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/disk/mkfs"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// asDaemon has this binary format one device and end, as a daemon does that a test can kill.
const asDaemon = "CRUST_TEST_FORMAT_DEVICE"

func TestMain(m *testing.M) {
	if device := os.Getenv(asDaemon); device != "" {
		os.Exit(formatOnce(device))
	}
	os.Exit(rig.Main(m))
}

const (
	mib  = int64(1) << 20
	size = 300 * mib // mkfs.xfs wants that much
)

// testFormatter is a Formatter with directories of its own.
type testFormatter struct {
	t    testing.TB
	conf mkfs.Config
	f    *mkfs.Formatter
	root mkfs.Root // of new filesystems
	id   string    // of the volume, if it has one
	// others tells that not only Prepare opens descriptors meanwhile.
	others bool
}

func newFormatter(t testing.TB, change ...func(*mkfs.Config)) *testFormatter {
	t.Helper()
	rig.Need(t, "blkid", "mkfs.ext4", "mkfs.xfs", "mkfs.btrfs", "mkswap", "sfdisk")
	r := &testFormatter{t: t, conf: mkfs.Config{LockFile: filepath.Join(t.TempDir(), "format.lock")}}
	for _, c := range change {
		c(&r.conf)
	}
	r.f = mkfs.New(r.conf)
	return r
}

func openPath(t testing.TB, device string) int {
	t.Helper()
	return check.Value(unix.Open(device, unix.O_PATH|unix.O_CLOEXEC, 0))(t)
}

func (r *testFormatter) prepare(device, fsType string, policy volume.FormatPolicy, readOnly bool) (bool, error) {
	r.t.Helper()
	fd := openPath(r.t, device)
	defer func() { _ = unix.Close(fd) }()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	before := rig.FDs(r.t, os.Getpid())
	formatted, err := r.f.Prepare(ctx, mkfs.Request{Device: fd, Volume: "/target/of/volume", ID: r.id, Path: device, FSType: fsType, Policy: policy, ReadOnly: readOnly,
		Root: r.root})
	after := rig.FDs(r.t, os.Getpid())
	check.That(r.t, len(after) <= len(before) || r.others, "descriptors before: %q, after: %q", before, after)
	return formatted, err
}

func (r *testFormatter) want(formatted bool, device, fsType string, policy volume.FormatPolicy, readOnly bool) {
	r.t.Helper()
	got, err := r.prepare(device, fsType, policy, readOnly)
	check.That(r.t, err == nil && got == formatted, "%s on %s, policy %q, read-only %v: formatted %v: %v", fsType, device, policy, readOnly, got, err)
}

// wantSame wants a device to hold what it held before.
func wantSame(t testing.TB, backing string, before [sha256.Size]byte, what string) {
	t.Helper()
	unix.Sync()
	check.That(t, before == hash(t, backing), "%v", what)
}

// refused wants an error of a kind that names the volume, the device and more,
// and a device that is byte for byte as before.
func (r *testFormatter) refused(device, backing, fsType string, policy volume.FormatPolicy, readOnly bool, kind volume.Kind, says ...string) {
	r.t.Helper()
	before := hash(r.t, backing)
	formatted, err := r.prepare(device, fsType, policy, readOnly)
	if err == nil || formatted || volume.KindOf(err) != kind {
		r.t.Errorf("%s, policy %q: formatted %v, kind %v: %v", fsType, policy, formatted, volume.KindOf(err), err)
		return
	}
	check.Says(r.t, "the error", err.Error(), append(says, "/target/of/volume", device)...)
	wantSame(r.t, backing, before, fmt.Sprintf("%s, policy %q: the device has changed", fsType, policy))
}

// hash tells contents: every block that is not zero, and where it lies.
func hash(t testing.TB, path string) [sha256.Size]byte {
	t.Helper()
	file := check.Value(os.Open(path))(t)
	defer func() { _ = file.Close() }()
	sum, block, zeros := sha256.New(), make([]byte, 65536), make([]byte, 65536)
	for at := int64(0); ; {
		// Holes may come and go; only what can be read counts.
		data, err := unix.Seek(int(file.Fd()), at, unix.SEEK_DATA)
		if err != nil {
			break
		}
		at = data &^ 65535
		n, err := file.ReadAt(block, at)
		check.Require(t, err == nil || errors.Is(err, io.EOF), "%v", err)
		if !bytes.Equal(block[:n], zeros[:n]) {
			_, _ = fmt.Fprintf(sum, "%d:", at)
			_, _ = sum.Write(block[:n])
		}
		at += 65536
	}
	return [sha256.Size]byte(sum.Sum(nil))
}

func (r *testFormatter) blank() (device, backing string) {
	r.t.Helper()
	backing = rig.Image(r.t, size)
	return rig.Loop(r.t, backing, loopdev.Options{}), backing
}

// write puts bytes into a backing file before it is attached.
func write(t testing.TB, backing string, at int64, data []byte) {
	t.Helper()
	file := check.Value(os.OpenFile(backing, os.O_WRONLY, 0))(t)
	defer func() { _ = file.Close() }()
	if at < 0 {
		at += size
	}
	check.Must(t, check.Err(file.WriteAt(data, at)))
}

func run(t testing.TB, input, name string, args ...string) {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Stdin = strings.NewReader(input)
	check.Run(t, cmd)
}

// mounts shows that the kernel takes the filesystem, and that it keeps a file.
func mounts(t testing.TB, device, fsType string) {
	t.Helper()
	dir := t.TempDir()
	for range 2 {
		err := unix.Mount(device, dir, fsType, 0, "")
		check.Require(t, err == nil, "mount %s as %s: %v", device, fsType, err)
		check.Must(t, os.WriteFile(filepath.Join(dir, "file"), []byte("kept"), 0o600))
		check.Must(t, unix.Unmount(dir, 0))
	}
}
