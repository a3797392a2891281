//go:build system

package front

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
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
	check.Must(t, n.stage(v))
	check.Must(t, n.publish(v, "pod-1"))
	check.Code(t, n.publish(v, "pod-2"), codes.FailedPrecondition, v.TargetOf("pod-1"), "wait until the other pod is gone")
	if _, err := os.Stat(v.TargetOf("pod-2")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the refused target is there: %v", err)
	}
	check.Must(t, n.unpublish(v, "pod-1"))
	check.Must(t, n.publish(v, "pod-2"))
	check.Must(t, n.unpublish(v, "pod-2"))
	check.Must(t, n.unpublish(v, "pod-1")) // of which kubelet knows no better
	check.Must(t, n.unstage(v))

	v.Mode, v.ReadOnly = csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY, true
	check.Must(t, n.stage(v))
	check.Must(t, n.publish(v, "pod-1"))
	check.Must(t, n.publish(v, "pod-2"))
	s := n.boot("sandbox-1", v, "pod-1")
	if err := os.WriteFile(s.Dir()+"/file", nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("a write to a read-only volume gave %v", err)
	}
	device, _ := n.mountInfo(v, "pod-2")
	if err := writeTo(device); err == nil {
		t.Error("the device of a read-only volume could be written")
	}
	n.end(s)
	check.Must(t, n.unpublish(v, "pod-1"))
	check.Must(t, n.unpublish(v, "pod-2"))
	check.Must(t, n.unstage(v))
	n.remove(v)
	n.wantClean()
}

func writeTo(device string) error {
	disk, err := os.OpenFile(device, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	_, err = disk.WriteAt(make([]byte, 4096), 8*mib)
	return errors.Join(err, disk.Sync(), disk.Close())
}

func TestGrowth(t *testing.T) {
	for name, args := range map[string][]string{"block": nil, "native": {"--defer"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			t.Parallel()
			n := newNode(t, deferAll, args...)
			v := n.create("pv-1", "ext4", 16*mib)
			check.Must(t, n.stage(v))
			check.Must(t, n.publish(v, "pod-1"))
			v.GrowDevice(32 * mib)
			// kubelet's call before there is a sandbox, which any other code would
			// turn into a pod that never starts.
			_, err := v.Expand(v.TargetOf("pod-1"), 32*mib)
			check.Code(t, err, codes.FailedPrecondition, "33554432", "kata")
			if size := n.deviceSize(v, "pod-1"); size != 32*mib {
				t.Errorf("the device has %d bytes", size)
			}
			_, err = v.Expand(v.Staging, 64*mib)
			check.Code(t, err, codes.FailedPrecondition)
			s := n.boot("sandbox-1", v, "pod-1")
			check.Succeeds(t, "the sandbox is known", func() error { _, err := n.stats(v, "pod-1"); return err })
			_, err = v.Expand(v.TargetOf("pod-1"), 32*mib) // Kata's agent cannot
			check.Code(t, err, codes.FailedPrecondition)
			n.end(s)
			check.Must(t, n.unpublish(v, "pod-1"))
			check.Must(t, n.unstage(v))
			n.remove(v)
			n.wantClean()
		})
	}
}

func (n *node) deviceSize(v *volume, pod string) int64 {
	n.t.Helper()
	device, _ := n.mountInfo(v, pod)
	out, err := exec.Command("blockdev", "--getsize64", device).Output()
	check.Must(n.t, err)
	var size int64
	_, err = fmt.Sscan(string(out), &size)
	check.Must(n.t, err)
	return size
}

// TestNotDeferred is the driver as if crust-proxy were not there.
func TestNotDeferred(t *testing.T) {
	t.Parallel()
	n := newNode(t, deferNone)
	v := n.create("pv-1", "ext4", 16*mib)
	check.Must(t, n.stage(v))
	check.Must(t, n.publish(v, "pod-1"))
	check.Must(t, os.WriteFile(v.TargetOf("pod-1")+"/file", []byte("on the host"), 0o600))
	check.Must(t, n.publish(v, "pod-2"))
	if raw, err := os.ReadFile(v.TargetOf("pod-2") + "/file"); err != nil || string(raw) != "on the host" {
		t.Errorf("%q, %v", raw, err)
	}
	reply, err := n.stats(v, "pod-1")
	if err != nil || len(reply.GetUsage()) == 0 {
		t.Errorf("stats: %v, %v", reply, err)
	}
	n.Kill()
	n.Extra = "front: {enabled: true}\n" + deferAll
	n.Start()
	n.waitServed()
	check.Must(t, n.publish(v, "pod-2")) // what a pod has stays as it is
	check.Must(t, n.unpublish(v, "pod-1"))
	check.Must(t, n.unpublish(v, "pod-2"))
	check.Code(t, n.publish(v, "pod-3"), codes.FailedPrecondition, v.ID, "was not kept", "delete every pod", "unstaged")
	check.Must(t, n.unstage(v)) // no pod has it, so kubelet stages it anew
	check.Must(t, n.stage(v))
	check.Must(t, n.publish(v, "pod-3"))
	n.wantGuarded(v, "pod-3")
	s := n.boot("sandbox-1", v, "pod-3")
	if raw, err := os.ReadFile(s.Dir() + "/file"); err != nil || string(raw) != "on the host" {
		t.Errorf("%q, %v", raw, err)
	}
	n.end(s)
	check.Must(t, n.unpublish(v, "pod-3"))
	check.Must(t, n.unstage(v))
	n.remove(v)
	n.wantClean()
}

// TestFrontComesUnderARunningPod is a node whose driver was there before the front:
// a pod has a volume of which there is no record.
func TestFrontComesUnderARunningPod(t *testing.T) {
	t.Parallel()
	n := newNode(t, deferNone)
	v := n.create("pv-1", "ext4", 16*mib)
	check.Must(t, n.stage(v))
	check.Must(t, n.publish(v, "pod-1"))
	check.Must(t, os.WriteFile(v.TargetOf("pod-1")+"/file", []byte("on the host"), 0o600))
	n.Kill()
	check.Must(t, os.RemoveAll(n.Dir+"/run/state/csi"))
	n.Extra = "front: {enabled: true}\n" + deferAll
	n.Start()
	n.waitServed()
	check.Must(t, n.stage(v)) // kubelet was restarted too
	check.Must(t, n.publish(v, "pod-1"))
	if raw, err := os.ReadFile(v.TargetOf("pod-1") + "/file"); err != nil || string(raw) != "on the host" {
		t.Errorf("the pod lost its volume: %q, %v", raw, err)
	}
	check.Code(t, n.publishAsking(v, "pod-2"), codes.FailedPrecondition, v.TargetOf("pod-1"))
	check.Must(t, n.unpublish(v, "pod-1"))
	check.Must(t, n.publishAsking(v, "pod-2"))
	n.wantGuarded(v, "pod-2")
	check.Code(t, n.publish(v, "pod-1"), codes.FailedPrecondition, v.TargetOf("pod-2"))
	check.Must(t, n.unpublish(v, "pod-1"))
	check.Must(t, n.unpublish(v, "pod-2"))
	check.Must(t, n.unstage(v))
	n.remove(v)
	n.wantClean()
}

// TestHostDoesNotMountWhatASandboxHad: the policy changes after a pod, as it differs from pod to
// pod where rules go by the runtime. What a guest could not write stays the host's.
func TestHostDoesNotMountWhatASandboxHad(t *testing.T) {
	t.Parallel()
	const elsewhere = "policy: {rules: [{name: all, drivers: [other.example.com], defer: true}]}"
	n := newNode(t, elsewhere)
	v := n.create("pv-1", "ext4", 16*mib)
	use := func(policy string, mode csi.VolumeCapability_AccessMode_Mode) error {
		n.Extra = "front: {enabled: true}\n" + policy
		n.restart()
		v.Mode, v.ReadOnly = mode, mode == csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY
		defer func() {
			check.Must(t, n.unpublish(v, "pod-1"))
			check.Must(t, n.unstage(v))
		}()
		if err := n.stage(v); err != nil {
			return err
		}
		return n.publish(v, "pod-1")
	}
	const one, reader = csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER, csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY
	check.Must(t, use(elsewhere, one)) // formats
	check.Must(t, use(deferAll, reader))
	check.Must(t, use(elsewhere, one))
	check.Must(t, use(deferAll, one))
	for _, mode := range []csi.VolumeCapability_AccessMode_Mode{one, reader} {
		check.Code(t, use(elsewhere, mode), codes.PermissionDenied, `rule "all"`, "guest may have written", n.Kubelet+"/crust-proxy/marks/")
	}
	base := n.Kubelet + "/plugins/kubernetes.io/csi/volumeDevices"
	raw := *v
	raw.FS, raw.Mode, raw.ReadOnly = "", one, false
	raw.Staging, raw.Target = base+"/staging/pv-1", base+"/publish/pv-1/pod-1"
	raw.Publish()
	check.Must(t, raw.TryUnpublish())
	check.Must(t, raw.Unstage())
	check.Must(t, os.RemoveAll(base))
	check.Must(t, use(strings.Replace(elsewhere, "}]", ", thenOnHost: allow}]", 1), one))
	check.Must(t, use(deferAll, one))
	n.remove(v)
	n.wantClean()
}

// TestHostIsKeptFromWhatWasReleasedByForce: the VM writes on, also when the daemon was restarted.
func TestHostIsKeptFromWhatWasReleasedByForce(t *testing.T) {
	t.Parallel()
	n := newNode(t, strings.Replace(deferAll, "}]", ", thenOnHost: allow}]", 1))
	v := n.create("pv-1", "ext4", 16*mib)
	check.Must(t, n.stage(v))
	check.Must(t, n.publish(v, "pod-1"))
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
	check.Must(t, n.unpublish(v, "pod-2"))
	check.Must(t, n.unstage(v))
	n.remove(v)
	n.wantClean()
}

func TestRawBlockAndInlineVolumesPass(t *testing.T) {
	t.Parallel()
	n := newNode(t, deferNone)
	v := n.create("pv-1", "ext4", 16*mib)
	base := n.Kubelet + "/plugins/kubernetes.io/csi/volumeDevices"
	block := *v
	block.FS, block.Staging, block.Target = "", base+"/staging/pv-1", base+"/publish/pv-1/pod-1"
	block.Publish()
	if info, err := os.Stat(block.Target); err != nil || info.Mode()&os.ModeDevice == 0 {
		t.Errorf("the target is no device: %v, %v", info, err)
	}
	check.Must(t, block.TryUnpublish())
	block.Delete()
	n.inline(t)
	check.Must(t, os.RemoveAll(base))
	n.wantClean()
}

// inline is an ephemeral volume: Publish only, with an id that kubelet made.
func (n *node) inline(t *testing.T) {
	v := n.driver.Volume(t, "inline", "ext4")
	v.ID = "csi-0123456789abcdef"
	v.Context = map[string]string{"csi.storage.k8s.io/ephemeral": "true", "size": "16Mi"}
	check.Must(t, n.publish(v, "pod-1"))
	check.Must(t, os.WriteFile(v.TargetOf("pod-1")+"/file", []byte("inline"), 0o600))
	check.Must(t, n.unpublish(v, "pod-1"))
	v.Context["crust-proxy.dev/defer-fs-ops"] = "true" // the pod's author asks, and no rule allows it
	check.Code(t, n.publish(v, "pod-1"), codes.PermissionDenied, "crust-proxy.dev/defer-fs-ops", "no rule")
	check.Must(t, n.unpublish(v, "pod-1"))
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
	n.wantClean()
}

// TestHungDriver has a driver that does not answer: other volumes, and the stats
// of this one, do not wait for it.
func TestHungDriver(t *testing.T) {
	t.Parallel()
	n := newNode(t, deferAll)
	v := n.create("pv-1", "ext4", 16*mib)
	check.Must(t, n.stage(v))
	check.Must(t, n.publish(v, "pod-1"))
	s := n.boot("sandbox-1", v, "pod-1")
	check.Succeeds(t, "stats", func() error { _, err := n.stats(v, "pod-1"); return err })
	check.Must(t, n.driver.Process.Signal(unix.SIGSTOP))
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	_, err := n.driver.Node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
		VolumeId: v.ID, StagingTargetPath: v.Staging, VolumeCapability: v.Access(),
	})
	check.Code(t, err, codes.DeadlineExceeded)
	if _, err := n.stats(v, "pod-1"); err != nil {
		t.Errorf("stats wait for the driver: %v", err)
	}
	check.Must(t, n.driver.Process.Signal(unix.SIGCONT))
	n.end(s)
	n.insist("unpublish", func() error { return n.unpublish(v, "pod-1") })
	n.insist("unstage", func() error { return n.unstage(v) })
	n.remove(v)
	n.wantClean()
}

func TestSecretsAreNowhere(t *testing.T) {
	t.Parallel()
	n := newNode(t, deferAll)
	v := n.create("pv-1", "ext4", 16*mib)
	const secret = "hunter2-very-secret"
	v.Secrets = map[string]string{"password": secret}
	v.Context = map[string]string{"csi.storage.k8s.io/serviceAccount.tokens": secret}
	check.Must(t, n.stage(v))
	check.Must(t, n.publish(v, "pod-1"))
	for _, dir := range []string{n.Dir + "/run", n.Kata} {
		out, err := exec.Command("grep", "-rl", "-e", secret, "-e", "aHVudGVyMi12ZXJ5LXNlY3Jld", dir).CombinedOutput()
		if err == nil {
			t.Errorf("the secret is in %s", out)
		}
	}
	check.Must(t, n.unpublish(v, "pod-1"))
	check.Must(t, n.unstage(v))
	n.remove(v)
	if strings.Contains(n.Log(), secret) {
		t.Error("the secret is in the log")
	}
	metrics, err := n.HTTP("/metrics")
	check.Must(t, err)
	if strings.Contains(metrics, secret) || !strings.Contains(metrics, `volumes_published_with_deferred_ops_total{driver="`+driverName+`"`) {
		t.Error("metrics: the secret is there, or the volume is not counted")
	}
	n.wantClean()
}
