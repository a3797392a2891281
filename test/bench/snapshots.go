package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/csivolume"
	snapshotrig "github.com/crust-proxy/crust-proxy/test/rig/snapshots"
)

const thinSize = int64(1) << 40

// snapshots measures the streams of a volume of 1 TiB with 1 GiB of data, and the backups
// made from them, against what else finds changes between two files or copies one.
func snapshots(r *testbed) {
	r.build("crust-driver", "crust-backup")
	d := startSnapshotDriver(r, "xfs")
	first, later := d.thinSnapshots()
	allocated, delta := d.streams(first, later)
	d.sheet.atMost("allocated blocks of a snapshot of 1 TiB with 1 GiB of data, p50", "< 1 s", allocated.Seconds(), 1, millis(allocated))
	d.sheet.atMost("its changed blocks, data shared by reflinks, p50", "< 1 s", delta.Seconds(), 1, millis(delta))
	d.sheet.mib("crust-driver's largest resident memory in it", "< 64 MiB", d.status(d.process.Pid(), "VmHWM:"), 64)
	other := startSnapshotDriver(r, "btrfs")
	allocated, delta = other.streams(other.thinSnapshots())
	d.sheet.atMost("allocated blocks, and changed ones, with images on btrfs instead of xfs, p50", "< 1 s", delta.Seconds(), 1, millis(allocated)+", "+millis(delta))
	other = startSnapshotDriver(r, "ext4")
	allocated, delta = other.streams(other.thinSnapshots())
	d.sheet.tell("the same on ext4, where data is copied, so that all of it is compared, p50", millis(allocated)+", "+millis(delta))
	d.backups(first, later)
	d.freezes()
}

// snapshotDriver is crust-driver with its images on a filesystem of its own.
type snapshotDriver struct {
	*testbed

	data, socket string
	process      *rig.Process
	client       *csivolume.Client
}

func startSnapshotDriver(r *testbed, pool string) *snapshotDriver {
	d := &snapshotDriver{testbed: r, data: rig.Pool(r.t, pool, rig.Disk(r.t, 8<<30, pool)), socket: r.daemon.Dir + "/" + pool + ".sock"}
	process, conn := rig.NewDriver(r.t, r.daemon.Program("crust-driver"), d.socket, d.data,
		"--node-id", "n", "--capacity", fmt.Sprint(8*thinSize), "--copy-limit", "2Gi")
	d.process, d.client = process, csivolume.NewClient(conn, csivolume.DriverName, r.t.TempDir())
	d.process.LogFile = r.daemon.Dir + "/log/" + pool
	r.must(d.process.Start())
	return d
}

func (d *snapshotDriver) image(snapshot string) string {
	return snapshotrig.Image(d.data, snapshot)
}

// streams takes those of the allocated blocks and of the changed ones, p50.
func (d *snapshotDriver) streams(first, later string) (allocated, delta time.Duration) {
	client := csi.NewSnapshotMetadataClient(d.client.Conn)
	took := d.timed(1, max(3, d.set.scale(20)), func() error {
		stream, err := client.GetMetadataAllocated(d.ctx, &csi.GetMetadataAllocatedRequest{SnapshotId: later})
		d.must(err)
		return drain(stream.Recv)
	}, func() error {
		stream, err := client.GetMetadataDelta(d.ctx, &csi.GetMetadataDeltaRequest{BaseSnapshotId: first, TargetSnapshotId: later})
		d.must(err)
		return drain(stream.Recv)
	})
	return median(took[0]), median(took[1])
}

// backups makes a full one, an increment of the 1 % that has changed, and a plain copy.
func (d *snapshotDriver) backups(first, later string) {
	dir := d.t.TempDir()
	whole, increment, copied := dir+"/first", dir+"/later", dir+"/copied"
	backup := func(snapshot, file string, more ...string) time.Duration {
		return d.run(d.daemon.Program("crust-backup"), append([]string{
			"backup", snapshot, "--csi-socket", d.socket, "--from", d.image(snapshot), "--file", file,
		}, more...)...)
	}
	rounds := max(1, d.set.scale(5))
	took := make([]durations, 4)
	for range rounds {
		took[0] = append(took[0], d.run("cp", "--reflink=never", "--sparse=always", d.image(later), copied))
		took[3] = append(took[3], took[0][len(took[0])-1]+d.run("sync", copied))
		took[1] = append(took[1], backup(first, whole))
		took[2] = append(took[2], backup(later, increment, "--base-file", whole))
		for _, file := range []string{whole, increment, copied} {
			d.must(os.Remove(file))
		}
	}
	plain := median(took[0])
	d.sheet.tell("cp of an image of 1 TiB with 1 GiB of data, holes kept, p50", millis(plain))
	d.sheet.ratio("a full backup of it by crust-backup, against that", "<= 2x", median(took[1]), plain, 2)
	d.sheet.ratio("the same, against cp and sync, because a backup is synced too", "", median(took[1]), median(took[3]), math.Inf(1))
	d.sheet.ratio("a backup of the 1 % that has changed since, against cp", "", median(took[2]), plain, math.Inf(1))
}

// freezes takes snapshots of an ext4 that somebody writes to.
func (d *snapshotDriver) freezes() {
	v := d.client.Create(d.t, "written", "ext4", 1<<30)
	d.must(v.Stage())
	file, err := os.Create(v.Staging + "/written")
	d.must(err)
	end, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		for n := int64(0); ; n++ {
			select {
			case <-end:
				ended <- file.Close()
				return
			case <-time.After(100 * time.Microsecond):
			}
			if _, err := file.WriteAt(bytes.Repeat([]byte{byte(n)}, 64<<10), n%512*(64<<10)); err != nil {
				ended <- err
				return
			}
		}
	}()
	for range max(10, d.set.scale(100)) {
		id, err := v.Snapshot("written")
		d.must(err)
		v.DeleteSnapshot(id)
	}
	close(end)
	d.must(<-ended)
	d.must(v.Unstage())
	held := d.held()
	d.sheet.tell("writes to an ext4 in use are held for a snapshot, from the first sync to the thaw, p50", millis(median(held)))
	d.sheet.atMost("the same, p99", "< 2 s", held.p99().Seconds(), 2, millis(held.p99()))
}

// held is how long the driver says that it held writes.
func (d *snapshotDriver) held() (all durations) {
	raw, err := os.ReadFile(d.process.LogFile)
	d.must(err)
	for line := range bytes.Lines(raw) {
		var said struct {
			Msg  string
			Took float64
		}
		if json.Unmarshal(line, &said) == nil && strings.HasPrefix(said.Msg, "held the writes") {
			all = append(all, time.Duration(said.Took*float64(time.Second)))
		}
	}
	return all
}

func drain[M any](receive func() (M, error)) error {
	for {
		if _, err := receive(); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
	}
}

// thinSnapshots makes one of a volume with 1 GiB of data, and one when 1 % has changed.
func (d *snapshotDriver) thinSnapshots() (first, later string) {
	v := d.client.Create(d.t, "thin", "", thinSize)
	image, err := os.OpenFile(d.image(v.ID), os.O_RDWR, 0)
	d.must(err)
	defer func() { _ = image.Close() }()
	take := func(name string, pieces int64, fill byte) string {
		for n := range pieces {
			_, err := image.WriteAt(bytes.Repeat([]byte{fill}, 1<<20), n*(1<<30))
			d.must(err)
		}
		id, err := v.Snapshot(name)
		d.must(err)
		return id
	}
	return take("first", 1024, 1), take("later", 10, 2)
}
