//go:build system

package vm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/database"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
	"github.com/crust-proxy/crust-proxy/test/rig/snapshots"
)

// TestSnapshotsOfADatabaseInAMachine: the driver has the guest freeze, and takes snapshots
// while a database writes. None needs a replay, and each has all records that were
// acknowledged before it.
func TestSnapshotsOfADatabaseInAMachine(t *testing.T) {
	images := t.TempDir()
	check.Must(t, unix.Mount(rig.Disk(t, 8<<30, "xfs"), images, "xfs", 0, ""))
	t.Cleanup(func() { check.Must(t, unix.Unmount(images, 0)) })
	// An emulated guest writes back slowly beside other work.
	b := newBench(t, "--data-dir", images, "--freeze-limit", "30s")
	const uid = "pod-database"
	volumes := b.volumes(uid)
	pod := b.pod(uid)
	taken := make(map[string][]snapshots.Moment)
	for _, v := range volumes {
		taken[v.FS] = v.whileADatabaseWrites(pod)
	}
	b.remove(pod)
	for _, v := range volumes {
		for _, m := range taken[v.FS] {
			v.wantConsistent(images, m)
			v.DeleteSnapshot(m.ID)
		}
		v.giveBack()
	}
	b.WantClean(t)
}

// whileADatabaseWrites takes snapshots of the volume.
func (v *volume) whileADatabaseWrites(pod *cri.Pod) (taken []snapshots.Moment) {
	t := v.b.t
	t.Helper()
	shared := t.TempDir()
	check.Must(t, rig.BuildStatic(shared+"/writer", "test/database/writer"))
	_, err := pod.Run(v.b.ctx(), cri.Container{
		Name: v.FS, Script: "/shared/writer /data /data /shared; exec sleep 2147483647",
		Mounts: []cri.Mount{{Host: shared, Container: "/shared"}, at(v)},
	})
	check.Must(t, err)
	acknowledged := func() uint64 {
		raw, err := os.ReadFile(shared + "/acknowledged")
		if err != nil || len(raw) != 8 {
			return 0
		}
		return binary.BigEndian.Uint64(raw)
	}
	for n := range 2 {
		m := snapshots.Moment{Before: acknowledged()}
		check.Eventually(t, "the database writes", func() bool { return acknowledged() > m.Before })
		m.Before = acknowledged()
		m.ID, err = v.Snapshot(fmt.Sprint(v.ID, n))
		check.Must(t, err)
		m.After = acknowledged()
		taken = append(taken, m)
	}
	t.Logf("%s: %+v", v.FS, taken)
	return taken
}

// wantConsistent looks at a snapshot as it is, without a repair.
func (v *volume) wantConsistent(data string, m snapshots.Moment) {
	t := v.b.t
	t.Helper()
	if !snapshots.Consistent(t, data, m.ID) {
		t.Errorf("%s: the snapshot is not consistent", v.FS)
	}
	image := snapshots.Image(data, m.ID)
	if v.FS != "xfs" && snapshots.NeedsReplay(t, image, v.FS) { // a frozen xfs has something in its log on purpose
		t.Errorf("%s: a journal has to be replayed", v.FS)
	}
	var count uint64
	var err error
	mounted := snapshots.AsItIs(t, image, v.FS, func(dir string) { count, err = database.Check(dir, dir) })
	check.Must(t, errors.Join(mounted, err))
	m.Want(t, count)
}
