//go:build system

package front

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

func TestOneWriterOrManyReaders(t *testing.T) {
	t.Parallel()
	n := newNode(t, deferAll)
	v := n.create("pv-1", "ext4", 16*mib)
	n.up(v, "pod-1")
	check.Code(t, n.publish(v, "pod-2"), codes.FailedPrecondition, v.TargetOf("pod-1"), "wait until the other pod is gone")
	_, err := os.Stat(v.TargetOf("pod-2"))
	check.That(t, errors.Is(err, os.ErrNotExist), "the refused target is there: %v", err)
	check.Must(t, n.unpublish(v, "pod-1"))
	check.Must(t, n.publish(v, "pod-2"))
	check.Must(t, n.unpublish(v, "pod-2"))
	check.Must(t, n.unpublish(v, "pod-1")) // of which kubelet knows no better
	check.Must(t, n.unstage(v))

	v.Mode, v.ReadOnly = csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY, true
	n.up(v, "pod-1")
	check.Must(t, n.publish(v, "pod-2"))
	s := n.boot("sandbox-1", v, "pod-1")
	err = os.WriteFile(s.Dir()+"/file", nil, 0o600)
	check.That(t, errors.Is(err, unix.EROFS), "a write to a read-only volume gave %v", err)
	device, _ := n.mountInfo(v, "pod-2")
	check.That(t, writeTo(device) != nil, "the device of a read-only volume could be written")
	n.end(s)
	check.Must(t, n.unpublish(v, "pod-1"))
	n.down(v, "pod-2")
}

func writeTo(device string) error {
	disk, err := os.OpenFile(device, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	_, err = disk.WriteAt(make([]byte, 4096), 8*mib)
	return errors.Join(err, disk.Sync(), disk.Close())
}

// TestHostIsKeptFromWhatWasReleasedByForce: the VM writes on, also when the daemon was restarted.
func TestHostIsKeptFromWhatWasReleasedByForce(t *testing.T) {
	t.Parallel()
	n := newNode(t, strings.Replace(deferAll, "}]", ", thenOnHost: allow}]", 1))
	v := n.create("pv-1", "ext4", 16*mib)
	n.up(v, "pod-1")
	device, _ := n.mountInfo(v, "pod-1")
	vm := rig.Hold(t, "<>", device)
	_, err := n.Admin().ReleaseVolume(t.Context(), &adminv1.ReleaseVolumeRequest{Volume: v.TargetOf("pod-1"), Force: true})
	check.Must(t, err)
	check.Must(t, n.unpublish(v, "pod-1"))
	// Nothing but the calls themselves asks who has the device.
	n.Extra = strings.Replace(n.Extra, "defer: true", "drivers: [other.example.com], defer: true", 1) + "\nreconcileInterval: 0s"
	for range 2 {
		for _, call := range []func() error{func() error { return n.stage(v) }, func() error { return n.publish(v, "pod-2") }} {
			check.Code(t, call(), codes.Aborted, "released by force", fmt.Sprint(vm.Process.Pid))
		}
		n.restart()
	}
	check.Code(t, n.stage(v), codes.Aborted) // it has reconciled
	vm.End()
	check.Succeeds(t, "the stage on the host", func() error { return n.stage(v) })
	check.Must(t, n.publish(v, "pod-2"))
	n.wantMounted(v, "pod-2")
	n.down(v, "pod-2")
}

// TestCallsAtOnce are duplicates and stats in between, as from a kubelet that has
// lost its patience.
func TestCallsAtOnce(t *testing.T) {
	t.Parallel()
	n := newNode(t, deferAll)
	v := n.create("pv-1", "ext4", 16*mib)
	v.For("pod-1")
	many := func(call func() error) {
		var all sync.WaitGroup
		for range 6 {
			all.Go(func() {
				for range 50 {
					err := call()
					if err == nil {
						return
					}
					if !maybe(err) {
						t.Error(err)
						return
					}
					time.Sleep(10 * time.Millisecond)
				}
				t.Error("never answered")
			})
		}
		all.Wait()
	}
	ctx, cancel := context.WithCancel(t.Context())
	asked := make(chan struct{})
	go func() {
		defer close(asked)
		for ; ctx.Err() == nil; time.Sleep(3 * time.Millisecond) {
			_, _ = n.stats(v, "pod-1")
		}
	}()
	for range 3 {
		many(func() error { return n.stage(v) })
		many(func() error { return n.publish(v, "pod-1") })
		s := n.boot("sandbox-1", v, "pod-1")
		n.end(s)
		_ = os.Remove(filepath.Join(n.kataDir(v, "pod-1"), "sandbox-1"))
		many(v.TryUnpublish)
		check.Must(t, n.unpublish(v, "pod-1"))
		many(v.Unstage)
		check.Must(t, n.unstage(v))
	}
	cancel()
	<-asked
	n.remove(v)
}

// TestHungDriver has a driver that does not answer: other volumes, and the stats
// of this one, do not wait for it.
func TestHungDriver(t *testing.T) {
	t.Parallel()
	n := newNode(t, deferAll)
	v := n.create("pv-1", "ext4", 16*mib)
	n.up(v, "pod-1")
	s := n.boot("sandbox-1", v, "pod-1")
	check.Succeeds(t, "stats", func() error { _, err := n.stats(v, "pod-1"); return err })
	check.Must(t, n.driver.Process.Signal(unix.SIGSTOP))
	check.Eventually(t, "no thread of the driver runs", func() bool {
		tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", n.driver.Process.Pid()))
		return len(tasks) > 0 && !slices.ContainsFunc(tasks, func(task string) bool {
			raw, _ := os.ReadFile(task)
			return !strings.Contains(string(raw), ") T ")
		})
	})
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	_, err := n.driver.Node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
		VolumeId: v.ID, StagingTargetPath: v.Staging, VolumeCapability: v.Access(),
	})
	check.Code(t, err, codes.DeadlineExceeded)
	_, err = n.stats(v, "pod-1")
	check.That(t, err == nil, "stats wait for the driver: %v", err)
	check.Must(t, n.driver.Process.Signal(unix.SIGCONT))
	n.end(s)
	n.insist("unpublish", func() error { return n.unpublish(v, "pod-1") })
	n.insist("unstage", func() error { return n.unstage(v) })
	n.remove(v)
}
