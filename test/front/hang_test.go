//go:build system

package front

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/fuse"
)

// hungLoop attaches a loop device over a file whose server stops to answer when hang is called: who asks for its image
// then hangs, unkillably.
func hungLoop(t *testing.T) (path string, hang func()) {
	t.Helper()
	dir := t.TempDir()
	check.Must(t, fuse.Prepare(dir))
	server, err := fuse.Mount(dir)
	check.Must(t, err)
	safe := time.AfterFunc(2*time.Minute, func() { _ = server.End() }) // also for a test that hangs itself
	path, err = loopdev.Attach(server.File, loopdev.Options{})
	t.Cleanup(func() {
		if safe.Stop() {
			check.Must(t, server.End()) // before it is detached
		} else {
			t.Error("the filesystem hung for two minutes")
		}
		check.Must(t, loopdev.Detach(path))
	})
	check.Must(t, err)
	return path, func() { server.Silent.Store(true) }
}

// scanPartitions has the kernel read the partitions of a loop device that hangs: who opens it, hangs too.
func scanPartitions(t *testing.T, path string, hang func()) {
	t.Helper()
	disk, err := os.OpenFile(path, os.O_RDWR, 0)
	check.Must(t, err)
	_, err = disk.WriteAt(make([]byte, 4096), 0) // the kernel writes that first
	check.Must(t, err)
	hang()
	go func() {
		_ = unix.IoctlLoopSetStatus64(int(disk.Fd()), &unix.LoopInfo64{Flags: unix.LO_FLAGS_PARTSCAN})
		_ = disk.Close()
	}()
	check.Eventually(t, "the kernel reads", func() bool {
		busy, err := os.ReadFile("/sys/block/" + filepath.Base(path) + "/inflight")
		return err == nil && strings.Trim(string(busy), " 0\n") != ""
	})
}

// TestLoopDevicesThatHang: they are of somebody else, and stop neither the driver nor the daemon, with a volume of
// that driver or another; nor does a volume that lies on one of them stop the other volumes, or the next daemon.
func TestLoopDevicesThatHang(t *testing.T) {
	n := newNode(t, deferAll)
	first, second := n.create("pv-1", "ext4", 16*mib), n.create("pv-2", "ext4", 16*mib)
	check.Must(t, n.stage(first))
	check.Must(t, n.publish(first, "pod-1"))
	scanned, hangScanned := hungLoop(t)
	scanPartitions(t, scanned, hangScanned)
	own, hangOwn := hungLoop(t)
	hangOwn()
	n.life(second, "pod-2")
	began := time.Now()
	_, err := n.Runtime().RuntimeStageVolume(t.Context(), n.StageRequest("pod-3", own))
	t.Logf("a volume that lies on one of them: %v after %v", err, time.Since(began))
	if time.Since(began) > 20*time.Second {
		t.Error("the volume was not refused in time")
	}
	n.driver.Process.Kill()
	n.startDriver()
	began = time.Now()
	n.Kill()
	n.Start()
	t.Logf("killed and started within %v", time.Since(began))
	n.waitServed()
	n.life(second, "pod-4")
	check.Must(t, n.unpublish(first, "pod-1"))
	check.Must(t, n.unstage(first))
}
