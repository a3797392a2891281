//go:build system

package driver_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/database"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/snapshots"
)

// write writes records, without fsync, until the test ends it: to two files in a directory, or
// to the first one in one and the second one in another.
func write(t *testing.T, first, second string) (stop func()) {
	t.Helper()
	d := startWriter(t, first, second, false, 50*time.Microsecond) // else it would fill the volume
	return func() { t.Helper(); d.stop(t) }
}

// wantChain fails where a record is missing or torn, and counts the records.
func wantChain(t *testing.T, first, second string) uint64 {
	t.Helper()
	return check.Value(database.Check(first, second))(t)
}

// image is the path of a volume's image.
func (v *volume) image() string { return snapshots.Image(v.data, v.id) }

// crash ends the use of a volume as the death of its user does: nothing is unmounted, and the journal has what was
// synced last. btrfs may commit instead, which leaves nothing to replay: then the next sync is taken.
func (v *volume) crash(fs string) {
	v.t.Helper()
	crashed := v.image() + ".crashed"
	for attempt := range 20 {
		file := check.Value(os.Create(fmt.Sprintf("%s/synced-%d", v.target, attempt)))(v.t)
		_, err := file.WriteString("synced")
		check.Must(v.t, errors.Join(err, file.Sync()))
		out, err := exec.Command("cp", "--sparse=always", v.image(), crashed).CombinedOutput()
		check.Must(v.t, file.Close())
		check.Require(v.t, err == nil, "%v: %s", err, out)
		if snapshots.NeedsReplay(v.t, crashed, fs) {
			v.must(v.unpublish, v.unstage)
			check.Must(v.t, os.Rename(crashed, v.image()))
			return
		}
		v.t.Logf("sync %d needs no replay", attempt)
	}
	v.t.Fatalf("no crash of the %s needs a replay", fs)
}

// TestSnapshotAfterACrash: nobody has the volume, and yet its journal has to be replayed.
func TestSnapshotAfterACrash(t *testing.T) {
	for _, pool := range rig.Sample([]string{"xfs", "ext4"}, 2) {
		r := newDriverOn(t, pool, false)
		for _, fs := range []string{"ext4", "xfs", "btrfs"} {
			t.Run(fs+" on "+pool, func(t *testing.T) {
				v := r.volume("v", rig.MountAccess(fs))
				v.up()
				v.crash(fs)
				crashed := v.mustSnapshot("crashed").GetSnapshotId()
				v.must(v.stage, v.publish)
				v.must(v.unpublish, v.unstage)
				repaired := v.mustSnapshot("repaired").GetSnapshotId()
				check.That(t, !r.consistent(crashed), "consistent after the crash")
				check.That(t, r.consistent(repaired), "not consistent after the repair")
				check.Must(t, errors.Join(r.removeSnapshot(crashed), r.removeSnapshot(repaired)))
				v.must(v.remove)
			})
		}
	}
}

// TestKilledWhileFrozen kills the driver between freeze and thaw: the filesystem goes on,
// and the same call makes the snapshot.
func TestKilledWhileFrozen(t *testing.T) {
	r := newDriverOn(t, "xfs", false, "--freeze-limit", "8s")
	v := r.volume("v", rig.MountAccess("ext4"))
	v.up()
	for _, point := range []string{"driver-frozen", "driver-taken"} {
		for _, again := range []bool{true, false} { // while it is frozen still, or afterwards
			r.restart("CRUST_FAILPOINTS=" + point + "=kill")
			check.Require(t, check.Err(v.snapshot("s")) != nil, "%s: not hit", point)
			r.wait()
			if !again {
				v.wantWrites()
			}
			r.start()
			r.wantVolumes(1)
			made := v.mustSnapshot("s")
			check.That(t, r.consistent(made.GetSnapshotId()), "%s: the snapshot is not consistent", point)
			v.wantWrites()
			check.Must(t, r.removeSnapshot(made.GetSnapshotId()))
		}
	}
	check.Eventually(t, "all watchdogs have ended", func() bool { return len(watchdogs(t, r.data)) == 0 })
	v.down()
}

// TestFreezeOfSomebodyElse is left alone: nobody knows whether it lasts.
func TestFreezeOfSomebodyElse(t *testing.T) {
	r := newDriverOn(t, "xfs", false, "--freeze-limit", "1s")
	v := r.volume("v", rig.MountAccess("ext4"))
	v.up()
	check.Must(t, exec.Command("fsfreeze", "--freeze", v.target).Run())
	made := v.mustSnapshot("s")
	check.That(t, !r.consistent(made.GetSnapshotId()), "the snapshot is said to be consistent")
	out, err := exec.Command("fsfreeze", "--unfreeze", v.target).CombinedOutput()
	check.That(t, err == nil, "it is not frozen any more: %v: %s", err, out)
	check.Must(t, r.removeSnapshot(made.GetSnapshotId()))
	v.down()
}

// wantWrites waits until a write to the volume ends.
func (v *volume) wantWrites() {
	v.t.Helper()
	written := check.Begin(func() error { return os.WriteFile(v.target+"/written", []byte("x"), 0o600) })
	select {
	case err := <-written:
		check.Must(v.t, err)
	case <-time.After(time.Minute):
		v.t.Fatal("writes are held still")
	}
}

// watchdogs lists the processes that wait for the end of a freeze of a driver.
func watchdogs(t *testing.T, data string) (found []string) {
	t.Helper()
	all := check.Value(filepath.Glob("/proc/[0-9]*/cmdline"))(t)
	for _, path := range all {
		raw, err := os.ReadFile(path)
		records, _ := os.Readlink(filepath.Dir(path) + "/fd/4")
		if err == nil && bytes.Contains(raw, []byte("watch-frozen")) && strings.HasPrefix(records, data) {
			found = append(found, path)
		}
	}
	return found
}

// TestSnapshotWithoutFreeze: the driver cannot freeze what uses a block volume. What was
// synced is there, and the record says that it is as after a crash.
func TestSnapshotWithoutFreeze(t *testing.T) {
	r := newDriverOn(t, "btrfs", false)
	v, restored := r.volume("v", rig.BlockAccess()), r.volume("restored", rig.BlockAccess())
	v.up()
	want := bytes.Repeat([]byte("synced! "), 512)
	device := check.Value(os.OpenFile(v.target, os.O_RDWR, 0))(t)
	check.Must(t, check.Err(device.WriteAt(want, mib)))
	check.Must(t, device.Sync())
	made := v.mustSnapshot("s")
	check.Must(t, device.Close())
	check.That(t, !r.consistent(made.GetSnapshotId()), "the snapshot is said to be consistent")
	restored.upFrom(snapshotSource(made.GetSnapshotId()), 0)
	got := make([]byte, len(want))
	device = check.Value(os.Open(restored.target))(t)
	_, err := device.ReadAt(got, mib)
	check.That(t, err == nil && bytes.Equal(got, want), "another content: %v", err)
	check.Must(t, device.Close())
	restored.down()
	v.down()
	check.Must(t, r.removeSnapshot(made.GetSnapshotId()))
}
