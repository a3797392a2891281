//go:build system

package front

import (
	"encoding/base64"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/fuse"
)

// hangTime is how long a filesystem may hang. Everybody who calls sync(2) on this machine waits as long.
const hangTime = 2 * time.Minute

// hungDisk is a loop device over a file whose server stops to answer.
type hungDisk struct {
	path   string
	server *fuse.Server
	// hang has the server stop: who asks for the image then hangs, unkillably, until end is called or hangTime is over.
	hang func(*atomic.Bool)
	end  func() error
}

func hungLoop(t *testing.T) *hungDisk {
	t.Helper()
	dir := t.TempDir()
	check.Must(t, fuse.Prepare(dir))
	disk := rig.Image(t, fuse.Size)
	rig.Mkfs(t, "ext4", disk)
	content := check.Value(os.Open(disk))(t)
	t.Cleanup(func() { _ = content.Close() })
	server := check.Value(fuse.Mount(dir, content))(t)
	end := sync.OnceValue(server.End)
	t.Cleanup(func() { check.Must(t, end()) })
	path := check.Value(loopdev.Attach(server.File, loopdev.Options{}))(t)
	t.Cleanup(func() {
		check.Must(t, end())
		check.Must(t, loopdev.Detach(path))
	})
	return &hungDisk{path: path, server: server, end: end, hang: func(how *atomic.Bool) {
		how.Store(true)
		late := time.AfterFunc(hangTime, func() { _ = end() }) // also for a test that hangs itself
		t.Cleanup(func() {
			if !late.Stop() {
				t.Logf("%s was ended after %v", path, hangTime)
			}
		})
	}}
}

// scanPartitions has the kernel read the partitions of a loop device that hangs: who opens it, hangs too.
func scanPartitions(t *testing.T, of *hungDisk) {
	t.Helper()
	disk := check.Value(os.OpenFile(of.path, os.O_RDWR, 0))(t)
	check.Value(disk.WriteAt(make([]byte, 4096), 0))(t) // the kernel writes that first
	of.hang(&of.server.Silent)
	go func() {
		_ = unix.IoctlLoopSetStatus64(int(disk.Fd()), &unix.LoopInfo64{Flags: unix.LO_FLAGS_PARTSCAN})
		_ = disk.Close()
	}()
	check.Eventually(t, "the kernel reads", func() bool {
		busy, err := os.ReadFile("/sys/block/" + filepath.Base(of.path) + "/inflight")
		return err == nil && strings.Trim(string(busy), " 0\n") != ""
	})
}

// TestLoopDevicesThatHang: they are of somebody else, as is a volume in Kata's tree, and stop neither the driver nor
// the daemon. Nor does a volume on record that lies on one of them stop the other volumes, or the next daemon.
func TestLoopDevicesThatHang(t *testing.T) {
	n := newNode(t, deferAll)
	n.leaves = true
	first, second := n.create("pv-1", "ext4", 16*mib), n.create("pv-2", "ext4", 16*mib)
	n.up(first, "pod-1")
	device, _ := n.mountInfo(first, "pod-1")
	scanned := hungLoop(t)
	foreign := n.Kata + "/" + base64.URLEncoding.EncodeToString([]byte("/foreign/mount")) // of another program
	check.Must(t, os.Mkdir(foreign, 0o700))
	check.Must(t, os.WriteFile(foreign+"/mountInfo.json", []byte(`{"volume-type":"block","device":"`+scanned.server.File+`","fstype":"ext4"}`), 0o600))
	scanPartitions(t, scanned)
	own := hungLoop(t)
	request := n.StageRequest("pod-3", own.path)
	check.Must(t, check.Err(n.Runtime().RuntimeStageVolume(t.Context(), request)))
	own.hang(&own.server.Silent)
	n.life(second, "pod-2")
	n.driver.Process.Kill()
	n.startDriver()
	began := time.Now()
	n.Kill()
	n.Start()
	check.That(t, time.Since(began) <= hangTime/2, "killed and started within %v", time.Since(began))
	n.waitServed()
	n.life(second, "pod-4")
	by := rig.Hold(t, "<", device)
	began = time.Now()
	check.Code(t, n.unpublish(first, "pod-1"), codes.Aborted, fmt.Sprintf("process %d ", by.Process.Pid))
	check.That(t, time.Since(began) <= hangTime/2, "the volume was not refused in time")
	by.End()
	check.Must(t, n.unpublish(first, "pod-1"))
	check.Must(t, n.unstage(first))
	_, err := n.Runtime().RuntimeUnstageVolume(t.Context(), &runtimev1.RuntimeUnstageVolumeRequest{VolumeTargetPath: request.GetVolumeTargetPath()})
	t.Logf("unstage of the volume that hangs: %v", err)
}

// TestCloseThatHangs: to close a device writes what the kernel has cached of it. While that hangs, volumes are
// formatted, published and released, and programs started.
func TestCloseThatHangs(t *testing.T) {
	n := newNode(t, deferAll)
	n.leaves = true
	own := hungLoop(t)
	request := n.StageRequest("pod-1", own.path)
	check.Must(t, check.Err(n.Runtime().RuntimeStageVolume(t.Context(), request)))
	disk := check.Value(os.OpenFile(own.path, os.O_RDWR, 0))(t)
	check.Must(t, check.Err(disk.WriteAt([]byte("what a program of this node has left in the cache"), fuse.Size/2)))
	own.hang(&own.server.Full)
	check.Must(t, disk.Close()) // it is not the last one
	unstage := func(within time.Duration) error {
		return check.Err(n.Runtime().RuntimeUnstageVolume(check.Within(t, within), &runtimev1.RuntimeUnstageVolumeRequest{VolumeTargetPath: request.GetVolumeTargetPath()}))
	}
	began := time.Now()
	check.Code(t, unstage(3*time.Second), codes.DeadlineExceeded)
	n.life(n.create("pv-2", "ext4", 16*mib), "pod-2")
	check.That(t, time.Since(began) < hangTime/2, "another volume was published and released within %v", time.Since(began))
	check.Must(t, own.end())
	check.Succeeds(t, "it is released", func() error { return unstage(20 * time.Second) })
}

// TestVolumesThatHangAreLeftBehind: a daemon whose volume hangs when its device is opened serves within seconds, and
// keeps the other volumes in order. The one that hangs is shown, belongs to nobody else, and is back when it answers.
func TestVolumesThatHangAreLeftBehind(t *testing.T) {
	n := newNode(t, deferAll)
	n.leaves = true
	good, later := n.create("pv-1", "ext4", 16*mib), n.create("pv-2", "ext4", 16*mib)
	n.up(good, "pod-1")
	own := hungLoop(t)
	request := n.StageRequest("pod-2", own.path)
	check.Must(t, check.Err(n.Runtime().RuntimeStageVolume(t.Context(), request)))
	target := request.GetVolumeTargetPath()
	n.Kill()
	scanPartitions(t, own)
	began := time.Now()
	check.Must(t, os.RemoveAll(n.Kata+"/"+base64.URLEncoding.EncodeToString([]byte(good.TargetOf("pod-1")))))
	n.Start()
	n.waitServed()
	check.That(t, time.Since(began) <= hangTime/2, "served after %v", time.Since(began))
	n.mountInfo(good, "pod-1") // reconcile has published it again
	state := func() adminv1.VolumeState {
		all := check.Value(n.Admin().ListVolumes(t.Context(), &adminv1.ListVolumesRequest{}))(t)
		for _, v := range all.GetVolumes() {
			if v.GetTargetPath() == target {
				return v.GetState()
			}
		}
		return adminv1.VolumeState_VOLUME_STATE_UNSPECIFIED
	}
	check.That(t, state() == adminv1.VolumeState_VOLUME_STATE_DEGRADED, "it is shown as %v", state())
	reconcile := func() { _, err := n.Admin().Reconcile(t.Context(), &adminv1.ReconcileRequest{}); check.Must(t, err) }
	reconcile()
	check.Code(t, check.Err(n.Runtime().RuntimeStageVolume(t.Context(), request)), codes.Aborted, "has not answered")
	check.Code(t, check.Err(n.Runtime().RuntimeStageVolume(t.Context(), n.StageRequest("pod-3", own.path))), codes.FailedPrecondition, target)
	n.life(later, "pod-4")
	check.Must(t, n.unpublish(good, "pod-1"))
	check.Must(t, n.unstage(good))
	check.That(t, time.Since(began) < hangTime, "all of that was done within %v", time.Since(began))
	check.Must(t, own.end())
	check.Eventually(t, "the volume is back", func() bool {
		reconcile()
		return state() == adminv1.VolumeState_VOLUME_STATE_PUBLISHED
	})
	check.Retried(t, "unstage", func() error {
		_, err := n.Runtime().RuntimeUnstageVolume(t.Context(), &runtimev1.RuntimeUnstageVolumeRequest{VolumeTargetPath: target})
		return err
	})
}
