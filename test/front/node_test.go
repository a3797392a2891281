//go:build system

package front

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/csivolume"
	"github.com/crust-proxy/crust-proxy/test/rig/kata"
)

func TestMain(m *testing.M) { os.Exit(rig.Main(m)) }

const (
	mib        = 1 << 20
	driverName = csivolume.DriverName
	deferAll   = "policy: {rules: [{name: all, defer: true}]}"
	deferNone  = "policy: {rules: []}"
	// deferThenHost lets the host mount a volume after a sandbox.
	deferThenHost = "policy: {rules: [{name: all, defer: true, thenOnHost: allow}]}"
)

// node is a node with crust-proxy in front of the reference driver.
type node struct {
	t testing.TB
	*rig.Daemon
	driver  *csivolume.Driver
	leaves  bool            // something is left at the end of the test, and may be
	pods    int             // that wrote to the volume
	foreign map[string]bool // targets that somebody else has mounted something on
}

// newNode starts both. Policy is the policy's YAML, args are added to the driver's.
func newNode(t testing.TB, policy string, args ...string) *node {
	t.Helper()
	rig.Need(t, "mkfs.ext4", "blkid")
	n := &node{t: t, Daemon: rig.NewDaemon(t), foreign: make(map[string]bool)}
	n.driver = csivolume.New(n.Daemon, policy, args...)
	n.startDriver()
	n.Start()
	n.waitServed()
	t.Cleanup(func() {
		if !t.Failed() && !n.leaves {
			n.wantClean()
		}
	})
	return n
}

// waitServed waits until the driver answers through the front.
func (n *node) waitServed() {
	n.t.Helper()
	check.Succeeds(n.t, "the driver answers through the front", func() error {
		check.Require(n.t, n.driver.Process.Alive() && !n.Dead(), "the driver or the daemon has ended")
		return n.driver.Served()
	})
}

func (n *node) served() bool { return n.driver.Served() == nil }

func (n *node) startDriver(env ...string) {
	n.t.Helper()
	check.Must(n.t, n.driver.Process.Launch(env...))
}

// arm restarts the daemon so that it is killed at a step, which may be one that it takes as it starts.
func (n *node) arm(step string) {
	n.t.Helper()
	n.Kill()
	n.Launch("CRUST_FAILPOINTS=" + step + "=kill")
	check.Eventually(n.t, "the daemon serves or is killed", func() bool {
		return n.served() || n.Dead()
	})
}

// wantClean asserts that nothing of any volume is left but the driver's data.
func (n *node) wantClean() {
	n.t.Helper()
	n.WantClean()
	var left []string
	for _, dir := range []string{n.Dir + "/run/state/csi", n.Kubelet + "/plugins/kubernetes.io/csi", n.Kubelet + "/pods"} {
		_ = filepath.WalkDir(dir, func(path string, entry os.DirEntry, err error) error {
			if err == nil && (!entry.IsDir() || strings.Count(filepath.Base(path), "") > 40) {
				left = append(left, path)
			}
			return nil
		})
	}
	for _, m := range rig.Mounts(n.Dir) {
		if m.Mountpoint != n.Dir {
			left = append(left, "mount "+m.Mountpoint)
		}
	}
	left = append(left, rig.LoopsLeft(n.driver.Data)...)
	check.That(n.t, len(left) == 0, "left behind:\n  %s", strings.Join(left, "\n  "))
}

// loops lists the loop devices over the driver's images.
func (n *node) loops() []string { return slices.Collect(maps.Keys(rig.Loops(n.driver.Data))) }

// boot starts a sandbox with a container for what the pod's target says.
func (n *node) boot(id string, v *volume, pod string) *kata.Guest {
	n.t.Helper()
	s := check.Value(kata.Boot(id, n.Kata, n.GoSandboxes, v.TargetOf(pod)))(n.t)
	n.t.Cleanup(func() { n.end(s) })
	return s
}

// end is the end of a sandbox; it may have ended.
func (n *node) end(s *kata.Guest) {
	n.t.Helper()
	check.Must(n.t, s.Stop())
}

func (n *node) kataDir(v *volume, pod string) string {
	return kata.VolumeDir(n.Kata, v.TargetOf(pod))
}

// mountInfo reads what Kata would.
func (n *node) mountInfo(v *volume, pod string) (device, fsType string) {
	n.t.Helper()
	device, fsType, err := kata.HandedOver(n.Kata, v.TargetOf(pod))
	check.Must(n.t, err)
	return device, fsType
}

// volume is a PersistentVolume, which several pods may have.
type volume = csivolume.Volume

// create has the driver make a volume, through the front, as a provisioner would.
func (n *node) create(name, fs string, size int64) *volume {
	n.t.Helper()
	return n.driver.Create(n.t, name, fs, size)
}

func (n *node) remove(v *volume) {
	n.t.Helper()
	check.Must(n.t, v.Remove())
}

// stage is MountDevice.
func (n *node) stage(v *volume) error { n.t.Helper(); return v.Stage() }

// publish is SetUpAt.
func (n *node) publish(v *volume, pod string) error { n.t.Helper(); return v.As(pod).TryPublish() }

// unpublish is TearDownAt.
func (n *node) unpublish(v *volume, pod string) error {
	n.t.Helper()
	if n.foreign[v.TargetOf(pod)] { // kubelet cannot remove it
		return v.As(pod).TryUnpublish()
	}
	return v.As(pod).TearDown()
}

// unstage is UnmountDevice.
func (n *node) unstage(v *volume) error { n.t.Helper(); return v.Unstage() }

// up and down are what kubelet does before and after a pod.
func (n *node) up(v *volume, pod string) {
	n.t.Helper()
	check.Must(n.t, n.stage(v))
	check.Must(n.t, n.publish(v, pod))
}

func (n *node) down(v *volume, pod string) {
	n.t.Helper()
	check.Must(n.t, n.unpublish(v, pod))
	check.Must(n.t, n.unstage(v))
	n.remove(v)
}

func (n *node) stats(v *volume, pod string) (*csi.NodeGetVolumeStatsResponse, error) {
	return v.As(pod).Stats()
}

// maybe tells whether kubelet takes an error for "may have happened": only then
// does it call Unpublish for a pod whose publish failed.
func maybe(err error) bool {
	switch status.Code(err) {
	case codes.Canceled, codes.DeadlineExceeded, codes.Unavailable, codes.ResourceExhausted, codes.Aborted:
		return true
	default:
		return false
	}
}
