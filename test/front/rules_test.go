//go:build system

package front

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// TestHostIsKeptFromWhatWasReleasedByForce: the VM writes on, also when the daemon was restarted.
func TestHostIsKeptFromWhatWasReleasedByForce(t *testing.T) {
	t.Parallel()
	n := newNode(t, strings.Replace(deferAll, "}]", ", thenOnHost: allow}]", 1))
	v := n.create("pv-1", "ext4", 16*mib)
	n.up(v, "pod-1")
	device, _ := n.mountInfo(v, "pod-1")
	vm := rig.Hold(t, "<>", device)
	check.Must(t, check.Err(n.Admin().ReleaseVolume(t.Context(), &adminv1.ReleaseVolumeRequest{Volume: v.TargetOf("pod-1"), Force: true})))
	metrics := check.Value(n.HTTP("/metrics"))(t)
	check.Says(t, "the metrics", metrics, "\ncrust_proxy_devices_held 1\n", "\ncrust_proxy_findings{severity=\"error\"} 1\n", "\ncrust_proxy_forced_releases_total 1\n")
	check.Must(t, n.unpublish(v, "pod-1"))
	// Nothing but the calls themselves asks who has the device.
	n.Extra = strings.Replace(n.Extra, "defer: true", "drivers: [other.example.com], defer: true", 1) + "\nreconcileInterval: 0s"
	for range 2 {
		for _, call := range []func() error{func() error { return n.stage(v) }, func() error { return n.publish(v, "pod-2") }} {
			check.Eventually(t, "a refusal names the process", func() bool { // the look at the device takes long on a busy node
				err := call()
				check.Code(t, err, codes.Aborted, "released by force")
				return strings.Contains(err.Error(), fmt.Sprint(vm.Process.Pid))
			})
		}
		out, err := n.Crustctl("doctor", "--quiet").CombinedOutput()
		check.That(t, err != nil && strings.Contains(string(out), "was released by force"), "doctor: %v\n%s", err, out)
		n.restart()
	}
	check.Code(t, n.stage(v), codes.Aborted) // it has reconciled
	vm.End()
	check.Succeeds(t, "the stage on the host", func() error { return n.stage(v) })
	check.Must(t, n.publish(v, "pod-2"))
	n.wantMounted(v, "pod-2")
	n.down(v, "pod-2")
	check.Says(t, "the metrics", check.Value(n.HTTP("/metrics"))(t), "\ncrust_proxy_devices_held 0\n")
}

// TestCallsAtOnce are duplicates and stats in between, as from a kubelet that has lost its patience.
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
	stop := check.Running(t, func(ctx context.Context) error {
		for ; ctx.Err() == nil; time.Sleep(3 * time.Millisecond) {
			_, _ = n.stats(v, "pod-1")
		}
		return nil
	})
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
	stop()
	n.remove(v)
}
