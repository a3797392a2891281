//go:build system

package front

import (
	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/csivolume"
)

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
