//go:build system

package driver_test

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	mathrand "math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// crustBackup runs crust-backup; points are failpoints.
func (r *testDriver) crustBackup(points string, args ...string) (out string, err error) {
	r.t.Helper()
	cmd := exec.Command(rig.Program(r.t, "crust-backup"), args...)
	cmd.Env = append(os.Environ(), "CRUST_FAILPOINTS="+points)
	raw, err := cmd.CombinedOutput()
	return string(raw), err
}

func (r *testDriver) mustBackup(args ...string) string {
	r.t.Helper()
	out, err := r.crustBackup("", args...)
	check.Require(r.t, err == nil, "crust-backup %v: %v\n%s", args, err, out)
	return out
}

// wantKilled runs crust-backup until a failpoint kills it.
func (r *testDriver) wantKilled(point string, args ...string) {
	r.t.Helper()
	out, err := r.crustBackup(point+"=kill", args...)
	var exit *exec.ExitError
	check.Require(r.t, errors.As(err, &exit) && exit.String() == "signal: killed", "%s: not killed: %v\n%s", point, err, out)
}

// raw is what "crust-backup blocks -o raw" prints.
func raw(all []blockRange) string {
	var text strings.Builder
	for _, one := range all {
		fmt.Fprintln(&text, one.from, one.to-one.from)
	}
	return text.String()
}

// wantSame compares the beginning of a device or file with another one.
func wantSame(t *testing.T, got, want string) {
	t.Helper()
	size := check.Value(os.Stat(want))(t).Size()
	out, err := exec.Command("cmp", "-n", strconv.FormatInt(size, 10), got, want).CombinedOutput()
	check.Require(t, err == nil && size > 0, "%s, in the %d bytes of %s: %v", out, size, want, err)
}

func disk(file string) int64 {
	var info syscall.Stat_t
	_ = syscall.Stat(file, &info) // then it is 0
	return info.Blocks * 512
}

// backedUp is a volume of 256 MiB with 64 MiB of data, of which 1 % changes between its two snapshots, and grows.
type backedUp struct {
	*volume
	first, second string
}

func newBackedUp(t *testing.T) *backedUp {
	t.Helper()
	r := newDriverOn(t, "xfs", false)
	v := &backedUp{volume: r.volume("v", rig.BlockAccess())}
	v.upFrom(nil, 256*mib)
	device := check.Value(os.OpenFile(v.target, os.O_RDWR, 0))(t)
	defer func() { _ = device.Close() }()
	for _, at := range []int64{0, 128 * mib} {
		check.Must(t, check.Err(io.CopyN(io.NewOffsetWriter(device, at), rand.Reader, 32*mib)))
	}
	check.Must(t, device.Sync())
	v.first = check.Value(v.snapshot("first"))(t).GetSnapshotId()
	for range 160 {
		block := make([]byte, 4096)
		_, _ = rand.Read(block) // it never fails
		check.Must(t, check.Err(device.WriteAt(block, mathrand.Int64N(32*mib/4096)*4096)))
	}
	check.Must(t, check.Err(device.WriteAt(make([]byte, mib), 130*mib)))
	check.Must(t, device.Sync())
	v.grow(300 * mib)
	check.Must(t, v.growNode(v.target, 300*mib))
	v.second = check.Value(v.snapshot("second"))(t).GetSnapshotId()
	return v
}

func (v *backedUp) clean() {
	v.t.Helper()
	v.must(v.unpublish, v.unstage)
	check.Must(v.t, v.removeSnapshot(v.first))
	check.Must(v.t, v.removeSnapshot(v.second))
	v.must(v.remove)
}

// TestBackup backs up two snapshots of a volume by what crust-backup learns from the driver,
// and restores them. It is killed in both.
func TestBackup(t *testing.T) {
	v := newBackedUp(t)
	server := []string{"--csi-socket", v.socket()}
	blocks := func(args ...string) string {
		return v.mustBackup(append(append([]string{"blocks", "-o", "raw"}, args...), server...)...)
	}
	got, want := blocks(v.first), raw(v.allocated(v.first, 0, 0))
	check.That(t, got == want && got != "", "allocated: %s, instead of %s", got, want)
	got, want = blocks(v.second, "--base", v.first), raw(v.delta(v.first, v.second, 0, 0))
	check.That(t, got == want && got != "", "changed: %s, instead of %s", got, want)
	out, err := v.crustBackup("", append([]string{"blocks", v.first, "--base", v.second}, server...)...)
	check.That(t, err != nil && strings.Contains(out, "must be an earlier snapshot"), "the wrong way round: %v, %s", err, out)

	full, increment := v.dir+"/full", v.dir+"/increment"
	first := append([]string{"backup", v.first, "--from", v.imageOf(v.first), "--file", full}, server...)
	v.wantKilled("backup-frame@1", first...)
	v.wantKilled("backup-frame@20", first...)
	check.That(t, check.Err(os.Stat(full)) != nil, "the backup has its name before it is complete")
	v.restart() // the driver may end as well
	v.mustBackup(first...)
	second := append([]string{"backup", v.second, "--from", v.imageOf(v.second), "--file", increment, "--base-file", full}, server...)
	v.wantKilled("backup-frame@20", second...)
	v.mustBackup(second...)
	whole, part := disk(full), disk(increment)
	check.That(t, part <= whole/16 && whole <= 66*mib, "a backup of 64 MiB has %d bytes, and one of 1 %% has %d", whole, part)
	restoreBoth(t, v, full, increment)
	v.clean()
}

// TestAFailedDisk: what a disk has not taken still looks right for as long as the kernel
// remembers it. No later backup may go on from there.
func TestAFailedDisk(t *testing.T) {
	v := newBackedUp(t)
	small := rig.Tmpfs(t, "size=32m")
	image := small + "/image"
	check.Must(t, os.WriteFile(image, nil, 0o600))
	check.Must(t, os.Truncate(image, 256*mib))
	rig.Mkfs(t, "ext4", image, "-O", "^has_journal")
	device, dir := rig.Loop(t, image, loopdev.Options{}), t.TempDir()
	check.Must(t, unix.Mount(device, dir, "ext4", 0, ""))
	t.Cleanup(func() { rig.UnmountAll(t, dir) })
	job := []string{"backup", v.first, "--from", v.imageOf(v.first), "--file", dir + "/full", "--csi-socket", v.socket()}
	for range 2 {
		out, err := v.crustBackup("", job...)
		check.Require(t, err != nil, "the disk has no place for the backup: %s", out)
	}
	check.Must(t, unix.Mount("", small, "", unix.MS_REMOUNT, "size=256m"))
	v.mustBackup(job...)
	check.Must(t, unix.Unmount(dir, 0)) // the kernel forgets what it has read
	check.Must(t, unix.Mount(device, dir, "ext4", 0, ""))
	v.mustBackup("restore", dir+"/full", "--check")
	v.clean()
}

func restoreBoth(t *testing.T, v *backedUp, full, increment string) {
	t.Helper()
	old := rig.Image(t, 320*mib)
	check.Must(t, os.WriteFile(old, bytes.Repeat([]byte{0xee}, int(320*mib)), 0o600))
	device := rig.Loop(t, old, loopdev.Options{})
	onDevice := []string{"restore", full, increment, "--to", device}
	for _, at := range []int{30, 70} { // in the full backup, and in the increment
		check.Must(t, os.WriteFile(device, bytes.Repeat([]byte{0xee}, int(256*mib)), 0))
		v.wantKilled(fmt.Sprintf("restore-frame@%d", at), onDevice...)
		got := resumed(t, v.mustBackup(append(onDevice, "-o", "json")...))
		check.That(t, got >= int64(at-10)*mib, "killed after %d parts, and only %d bytes were not written again", at, got)
		wantSame(t, device, v.imageOf(v.second))
	}
	v.mustBackup("restore", full, "--to", device)
	wantSame(t, device, v.imageOf(v.first))
	rest := check.Value(os.ReadFile(device))(t)[256*mib:]
	check.That(t, len(rest) == 64<<20 && len(bytes.Trim(rest, "\x00")) == 0, "the rest of a larger device is left as it was")

	image := v.dir + "/restored"
	inFile := []string{"restore", full, increment, "--to", image}
	v.wantKilled("restore-frame@30", inFile...)
	check.That(t, check.Err(os.Stat(image)) != nil, "the image has its name before it is complete")
	got := resumed(t, v.mustBackup(append(inFile, "-o", "json")...))
	check.That(t, got >= 20*mib, "only %d bytes of the image were not written again", got)
	wantSame(t, image, v.imageOf(v.second))
	n := disk(image)
	check.That(t, n <= 66*mib, "%d bytes: the holes are filled", n)
	v.mustBackup("restore", full, increment, "--check")
}

// resumed is how much a restore left as it was.
func resumed(t *testing.T, out string) int64 {
	t.Helper()
	var done struct{ ResumedBytes int64 }
	check.Must(t, json.Unmarshal([]byte(out), &done))
	return done.ResumedBytes
}

// TestRestoreToAFailedDisk: what a disk has not taken, the kernel may still show to who asks. It has to
// be written again.
func TestRestoreToAFailedDisk(t *testing.T) {
	r := newDriverOn(t, "", false)
	v, dir, small := r.volume("v", rig.BlockAccess()), t.TempDir(), rig.Tmpfs(t, "size=16m")
	check.Must(t, v.createFrom(nil, 32*mib))
	check.Must(t, os.WriteFile(r.imageOf(v.id), bytes.Repeat([]byte{7}, int(32*mib)), 0o600))
	made := check.Value(v.snapshot("s"))(t)
	r.mustBackup("backup", made.GetSnapshotId(), "--from", r.imageOf(v.id), "--file", dir+"/backup", "--csi-socket", r.socket())
	check.Must(t, os.WriteFile(small+"/image", nil, 0o600))
	check.Must(t, os.Truncate(small+"/image", 32*mib))
	device := rig.Loop(t, small+"/image", loopdev.Options{})
	out, err := r.crustBackup("", "restore", dir+"/backup", "--to", device)
	check.Require(t, err != nil, "the disk has no place for it: %s", out)
	check.Must(t, unix.Mount("", small, "", unix.MS_REMOUNT, "size=256m"))
	r.mustBackup("restore", dir+"/backup", "--to", device)
	wantSame(t, small+"/image", r.imageOf(v.id))
	check.Must(t, r.removeSnapshot(made.GetSnapshotId()))
	v.must(v.remove)
}

// TestRestoreLeavesDevicesInUse: nothing is written to a device that somebody has.
func TestRestoreLeavesDevicesInUse(t *testing.T) {
	r := newDriverOn(t, "", false)
	dir := t.TempDir()
	device, small, image := rig.Disk(t, 64*mib, "ext4"), rig.Disk(t, 8*mib, ""), rig.Image(t, 16*mib)
	check.Must(t, os.WriteFile(image, bytes.Repeat([]byte{7}, int(16*mib)), 0o600))
	v := r.volume("v", rig.BlockAccess())
	check.Must(t, v.createFrom(nil, 16*mib))
	check.Must(t, os.WriteFile(r.imageOf(v.id), bytes.Repeat([]byte{7}, int(16*mib)), 0o600))
	made := check.Value(v.snapshot("s"))(t)
	file := dir + "/backup"
	r.mustBackup("backup", made.GetSnapshotId(), "--from", image, "--file", file, "--csi-socket", r.socket())

	before := check.Value(os.ReadFile(device))(t)
	refused := func(to, text string) {
		t.Helper()
		out, err := r.crustBackup("", "restore", file, "--to", to)
		check.That(t, err != nil && strings.Contains(out, text), "%s: %v, %s", to, err, out)
	}
	check.Must(t, os.Mkdir(dir+"/mnt", 0o700))
	check.Must(t, unix.Mount(device, dir+"/mnt", "ext4", unix.MS_RDONLY|unix.MS_NOATIME, "noload"))
	refused(device, "is in use")
	check.Must(t, unix.Unmount(dir+"/mnt", 0))
	claim := check.Value(os.OpenFile(device, os.O_RDONLY|unix.O_EXCL, 0))(t)
	refused(device, "is in use")
	check.Must(t, claim.Close())
	other := check.Value(os.OpenFile(device, os.O_RDWR, 0))(t)
	refused(device, "is open in process")
	check.Must(t, other.Close())
	for n, start := range []string{"2048", "67584"} {
		check.Must(t, exec.Command("addpart", device, strconv.Itoa(n+1), start, "32768").Run())
		defer func() { check.Must(t, exec.Command("delpart", device, strconv.Itoa(n+1)).Run()) }()
	}
	other = check.Value(os.OpenFile(device, os.O_RDWR, 0))(t)
	refused(device+"p1", "which has its disk open")
	check.Must(t, other.Close())
	refused(small, "is it the right one?")
	refused(image, "exists already")
	check.That(t, bytes.Equal(before, check.Value(os.ReadFile(device))(t)), "something was written")
	r.mustBackup("restore", file, "--to", device)
	wantSame(t, device, image)
	other = check.Value(os.OpenFile(device+"p2", os.O_RDWR, 0))(t)
	r.mustBackup("restore", file, "--to", device+"p1")
	check.Must(t, other.Close())
	wantSame(t, device+"p1", image)
	check.Must(t, r.removeSnapshot(made.GetSnapshotId()))
	v.must(v.remove)
}
