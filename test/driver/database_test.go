//go:build system

package driver_test

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/database"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/snapshots"
)

// writer is a database in this process. What it has acknowledged must never be lost.
type writer struct {
	acknowledged atomic.Uint64
	end          chan struct{}
	ended        chan error
}

// startWriter starts one that does what database.Writer does, with a pause before each record.
func startWriter(t *testing.T, first, second string, sync bool, pause time.Duration) *writer {
	t.Helper()
	files := check.Value(database.Create(first, second))(t)
	w := &writer{end: make(chan struct{}), ended: make(chan error, 1)}
	go func() {
		w.ended <- files.Run(sync, func(records uint64) bool {
			w.acknowledged.Store(records)
			select {
			case <-w.end:
				return false
			case <-time.After(pause):
				return true
			}
		})
	}()
	return w
}

func (w *writer) stop(t *testing.T) {
	t.Helper()
	close(w.end)
	check.Must(t, <-w.ended)
}

// snapshots takes one of a volume each second.
func (w *writer) snapshots(v *volume) (all []snapshots.Moment) {
	v.t.Helper()
	check.Eventually(v.t, "the database works", func() bool { return w.acknowledged.Load() > 0 })
	for n := range snapshots.Seconds() {
		next := time.Now().Add(time.Second)
		before := w.acknowledged.Load()
		id := v.mustSnapshot(fmt.Sprint("s", n)).GetSnapshotId()
		all = append(all, snapshots.Moment{ID: id, Before: before, After: w.acknowledged.Load()})
		time.Sleep(time.Until(next))
	}
	return all
}

// TestSnapshotsOfADatabase takes one a second. Each restored one has all that was
// acknowledged, in an unbroken chain: as it is on the disk, and as a pod mounts it.
func TestSnapshotsOfADatabase(t *testing.T) {
	for _, fs := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fs, func(t *testing.T) {
			r := newDriverOn(t, "xfs", false, aMinute...)
			v := r.volume("v", rig.MountAccess(fs))
			v.up()
			w := startWriter(t, v.target, v.target, true, 0)
			all := w.snapshots(v)
			clone := r.volume("clone", rig.MountAccess(fs))
			check.Must(t, clone.createFrom(v.asSource(), 0)) // while it is written to
			w.stop(t)
			clone.must(clone.stage, clone.publish)
			wantChain(t, clone.target, clone.target)
			clone.down()
			t.Logf("%d records", w.acknowledged.Load())
			v.down()
			for _, m := range all {
				check.That(t, r.consistent(m.ID), "a snapshot is not consistent")
				restored := r.volume("restored", rig.MountAccess(fs))
				check.Must(t, restored.createFrom(snapshotSource(m.ID), 0))
				// A frozen xfs has something in its log on purpose.
				check.That(t, fs == "xfs" || !snapshots.NeedsReplay(t, restored.image(), fs), "a journal has to be replayed")
				check.Must(t, snapshots.AsItIs(t, restored.image(), fs, func(dir string) { m.Want(t, wantChain(t, dir, dir)) }))
				restored.must(restored.stage, restored.publish)
				m.Want(t, wantChain(t, restored.target, restored.target))
				restored.down()
				check.Must(t, r.removeSnapshot(m.ID))
			}
		})
	}
}
