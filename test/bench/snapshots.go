package main

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/rig"
)

const (
	thinSize = int64(1) << 40
	// comparedSize is what cmp reads of the two images: the whole takes a quarter of an hour.
	comparedSize = int64(8) << 30
)

// snapshots measures the streams of a volume of 1 TiB with 1 GiB of data, against what else
// finds changes between two files.
func snapshots(r *testbed) {
	data := r.t.TempDir()
	r.must(unix.Mount(rig.Disk(r.t, 8<<30, "xfs"), data, "xfs", 0, ""))
	r.t.Cleanup(func() { r.must(unix.Unmount(data, 0)) })
	r.build("crust-driver")
	socket := r.daemon.Dir + "/driver.sock"
	driver := &rig.Process{
		Name: "crust-driver", Program: r.daemon.Program("crust-driver"), LogFile: r.daemon.Dir + "/log/crust-driver",
		Args:  []string{"--endpoint", socket, "--data-dir", data, "--node-id", "n", "--capacity", fmt.Sprint(8 * thinSize)},
		Ready: func() error { _, err := os.Stat(socket); return err },
	}
	r.t.Cleanup(driver.Kill)
	r.must(driver.Start())
	conn := r.dial(socket)
	first, later := thinSnapshots(r, csi.NewControllerClient(conn), data+"/images")
	client := csi.NewSnapshotMetadataClient(conn)
	took := r.timed(1, max(3, r.set.scale(20)), func() error {
		stream, err := client.GetMetadataAllocated(r.ctx, &csi.GetMetadataAllocatedRequest{SnapshotId: later})
		r.must(err)
		return drain(stream.Recv)
	}, func() error {
		stream, err := client.GetMetadataDelta(r.ctx, &csi.GetMetadataDeltaRequest{BaseSnapshotId: first, TargetSnapshotId: later})
		r.must(err)
		return drain(stream.Recv)
	})
	allocated, delta := median(took[0]), median(took[1])
	r.sheet.atMost("allocated blocks of a snapshot of 1 TiB with 1 GiB of data, p50", "< 1 s", allocated.Seconds(), 1, millis(allocated))
	r.sheet.atMost("its changed blocks, data shared by reflinks, p50", "< 1 s", delta.Seconds(), 1, millis(delta))
	r.sheet.mib("crust-driver's largest resident memory in it", "< 64 MiB", peak(r, driver.Pid()), 64)
	images, err := filepath.Glob(data + "/images/*.img")
	r.must(err)
	images = slices.DeleteFunc(images, func(path string) bool { // the other two are equal, so that cmp reads all
		return strings.Contains(path, fmt.Sprintf("%x", sha256.Sum256([]byte(first))))
	})
	start := time.Now()
	r.must(exec.CommandContext(r.ctx, "cmp", "--bytes", fmt.Sprint(comparedSize), images[0], images[1]).Run()) //nolint:gosec // images of ours
	r.sheet.tell("cmp of the first 8 of 1,024 GiB of two equal images of it", millis(time.Since(start)))
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
func thinSnapshots(r *testbed, controller csi.ControllerClient, images string) (first, later string) {
	made, err := controller.CreateVolume(r.ctx, &csi.CreateVolumeRequest{
		Name: "thin", CapacityRange: &csi.CapacityRange{RequiredBytes: thinSize},
		VolumeCapabilities: []*csi.VolumeCapability{{
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
			AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
		}},
	})
	r.must(err)
	found, err := filepath.Glob(images + "/*.img")
	r.must(err)
	image, err := os.OpenFile(found[0], os.O_RDWR, 0)
	r.must(err)
	defer func() { _ = image.Close() }()
	take := func(name string, pieces int64, fill byte) string {
		for n := range pieces {
			_, err := image.WriteAt(bytes.Repeat([]byte{fill}, 1<<20), n*(1<<30))
			r.must(err)
		}
		taken, err := controller.CreateSnapshot(r.ctx, &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: made.GetVolume().GetVolumeId()})
		r.must(err)
		return taken.GetSnapshot().GetSnapshotId()
	}
	return take("first", 1024, 1), take("later", 10, 2)
}

// peak is the largest resident memory of a process so far, in bytes.
func peak(r *testbed, pid int) (kib int64) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	r.must(err)
	_, rest, _ := strings.Cut(string(raw), "\nVmHWM:")
	_, err = fmt.Sscan(rest, &kib)
	r.must(err)
	return kib << 10
}
