//go:build system

package driver_test

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/superblock"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// database writes as a database does: a record into the first file, fsync, and the same into
// the second, again and again. What it has acknowledged must never be lost.
type database struct {
	acknowledged atomic.Uint64
	end          chan struct{}
	ended        chan error
}

func startDatabase(t *testing.T, dir string) *database {
	t.Helper()
	journal, err := os.Create(dir + "/first")
	check.Must(t, err)
	table, err := os.Create(dir + "/second")
	check.Must(t, err)
	d := &database{end: make(chan struct{}), ended: make(chan error, 1)}
	go func() { d.ended <- errors.Join(d.run(journal, table), journal.Close(), table.Close()) }()
	return d
}

func (d *database) run(journal, table *os.File) error {
	for c := new(chain); ; d.acknowledged.Store(c.records) {
		select {
		case <-d.end:
			return nil
		default:
		}
		record := c.next()
		if _, err := journal.Write(record); err != nil {
			return err
		}
		if err := journal.Sync(); err != nil {
			return err
		}
		if _, err := table.Write(record); err != nil {
			return err
		}
	}
}

func (d *database) stop(t *testing.T) {
	t.Helper()
	close(d.end)
	check.Must(t, <-d.ended)
}

// moment is a snapshot, and how many records were acknowledged before and after it.
type moment struct {
	id            string
	before, after uint64
}

// snapshots takes one of a volume each second.
func (d *database) snapshots(v *volume, seconds int) (all []moment) {
	v.t.Helper()
	check.Eventually(v.t, "the database works", func() bool { return d.acknowledged.Load() > 0 })
	for n := range seconds {
		next := time.Now().Add(time.Second)
		before := d.acknowledged.Load()
		id := v.mustSnapshot(fmt.Sprint("s", n)).GetSnapshotId()
		all = append(all, moment{id, before, d.acknowledged.Load()})
		time.Sleep(time.Until(next))
	}
	return all
}

// wantRecords fails unless there are all that were acknowledged before the snapshot, and
// none of later.
func (m moment) wantRecords(t *testing.T, count uint64) {
	t.Helper()
	if count < m.before || count > m.after+1 {
		t.Errorf("%d records, and %d to %d were acknowledged", count, m.before, m.after)
	}
}

// untouched are mount options by which a filesystem is not repaired in any way.
var untouched = map[string]string{"ext4": "noload", "xfs": "norecovery,nouuid", "btrfs": "rescue=nologreplay"}

// asItIs calls look with the filesystem of a volume as it is on its image: nothing can be
// written, and no journal is replayed.
func (v *volume) asItIs(fs string, look func(dir string)) error {
	v.t.Helper()
	device, err := loopdev.Attach(v.image(), loopdev.Options{ReadOnly: true})
	check.Must(v.t, err)
	defer func() { check.Must(v.t, loopdev.Detach(device)) }()
	dir := v.t.TempDir()
	if err := unix.Mount(device, dir, fs, unix.MS_RDONLY, untouched[fs]); err != nil {
		return err
	}
	defer func() { check.Must(v.t, unix.Unmount(dir, 0)) }()
	look(dir)
	return nil
}

func (v *volume) needsReplay(fs string) bool {
	v.t.Helper()
	image, err := os.Open(v.image())
	check.Must(v.t, err)
	defer func() { _ = image.Close() }()
	dirty, err := superblock.NeedsReplay(image, fs)
	check.Must(v.t, err)
	return dirty
}

// seconds is how long a database runs. CRUST_SECONDS=60 makes it a minute.
func seconds() int { return int(number("CRUST_SECONDS", 3)) }

// TestSnapshotsOfADatabase takes one a second. Each restored one has all that was
// acknowledged, in an unbroken chain: as it is on the disk, and as a pod mounts it.
func TestSnapshotsOfADatabase(t *testing.T) {
	for _, fs := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fs, func(t *testing.T) {
			r := newDriverOn(t, "xfs", false)
			v := r.volume("v", mountAccess(fs))
			v.up()
			d := startDatabase(t, v.target)
			all := d.snapshots(v, seconds())
			d.stop(t)
			t.Logf("%d records", d.acknowledged.Load())
			v.down()
			for _, m := range all {
				if !r.consistent(m.id) {
					t.Error("a snapshot is not consistent")
				}
				restored := r.volume("restored", mountAccess(fs))
				check.Must(t, restored.createFrom(snapshotSource(m.id), 0))
				if fs != "xfs" && restored.needsReplay(fs) { // a frozen xfs has something in its log on purpose
					t.Error("a journal has to be replayed")
				}
				check.Must(t, restored.asItIs(fs, func(dir string) { m.wantRecords(t, wantChain(t, dir, dir)) }))
				restored.must(restored.stage, restored.publish)
				m.wantRecords(t, wantChain(t, restored.target, restored.target))
				restored.down()
				check.Must(t, r.removeSnapshot(m.id))
			}
			r.wantNothing()
		})
	}
}

// TestSnapshotsOfADatabaseWithoutFreeze has somebody mount the volume whom the driver does not
// know: what was synced comes back by a replay, the rest is lost, and the record says so.
func TestSnapshotsOfADatabaseWithoutFreeze(t *testing.T) {
	for _, fs := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fs, func(t *testing.T) {
			r := newDriverOn(t, "xfs", false)
			v := r.volume("v", mountAccess(fs))
			v.up()
			v.must(v.unpublish, v.unstage) // the filesystem is made
			v.access = blockAccess()
			v.must(v.stage, v.publish)
			dir := t.TempDir()
			check.Must(t, unix.Mount(v.target, dir, fs, 0, "")) // by a name that is not the device's
			t.Cleanup(func() { _ = unix.Unmount(dir, 0) })
			d := startDatabase(t, dir)
			all := d.snapshots(v, seconds())
			d.stop(t)
			check.Must(t, unix.Unmount(dir, 0))
			v.down()
			dirty, short := 0, 0
			for _, m := range all {
				if r.consistent(m.id) {
					t.Error("a snapshot is said to be consistent")
				}
				restored := r.volume("restored", mountAccess(fs))
				check.Must(t, restored.createFrom(snapshotSource(m.id), 0))
				if restored.needsReplay(fs) {
					dirty++
				}
				if m.lacksRecords(restored, fs) {
					short++
				}
				restored.must(restored.stage, restored.publish)        // the kernel replays it
				m.wantRecords(t, records(t, restored.target+"/first")) // what was synced
				restored.down()
				check.Must(t, r.removeSnapshot(m.id))
			}
			if t.Logf("of %d snapshots %d need a replay, and without it %d lack records", len(all), dirty, short); dirty == 0 || short == 0 {
				t.Error("without a freeze nothing is worse")
			}
			r.wantNothing()
		})
	}
}

// lacksRecords tells whether acknowledged records are not there before a replay.
func (m moment) lacksRecords(v *volume, fs string) bool {
	v.t.Helper()
	bytes := int64(0)
	err := v.asItIs(fs, func(dir string) {
		if info, err := os.Stat(dir + "/first"); err == nil {
			bytes = info.Size()
		}
	})
	return err != nil || bytes < int64(m.before)*int64(len(new(chain).next()))
}
