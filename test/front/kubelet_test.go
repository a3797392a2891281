//go:build system

package front

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// volume is a PersistentVolume as kubelet knows it.
type volume struct {
	id       string
	name     string // of the PV
	fs       string
	mode     csi.VolumeCapability_AccessMode_Mode
	context  map[string]string
	secrets  map[string]string
	readOnly bool
	flags    []string
}

// create has the driver make a volume, through the front, as a provisioner would.
func (n *node) create(name, fs string, size int64) *volume {
	n.t.Helper()
	v := &volume{name: name, fs: fs, mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER}
	reply, err := n.controller.CreateVolume(n.t.Context(), &csi.CreateVolumeRequest{
		Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: size}, VolumeCapabilities: []*csi.VolumeCapability{v.capability()},
	})
	check.Must(n.t, err)
	v.id, v.context = reply.GetVolume().GetVolumeId(), reply.GetVolume().GetVolumeContext()
	return v
}

func (n *node) remove(v *volume) {
	n.t.Helper()
	_, err := n.controller.DeleteVolume(n.t.Context(), &csi.DeleteVolumeRequest{VolumeId: v.id})
	check.Must(n.t, err)
}

func (v *volume) capability() *csi.VolumeCapability {
	capability := rig.MountAccess(v.fs, v.flags...)
	capability.AccessMode.Mode = v.mode
	return capability
}

func (v *volume) staging(n *node) string {
	return n.Kubelet + "/plugins/kubernetes.io/csi/" + driverName + "/" + v.name + "/globalmount"
}

func (v *volume) target(n *node, pod string) string {
	return n.Kubelet + "/pods/" + pod + "/volumes/kubernetes.io~csi/" + v.name + "/mount"
}

// callTime is kubelet's for a CSI call.
const callTime = 2 * time.Minute

// stage is MountDevice.
func (n *node) stage(v *volume) error {
	check.Must(n.t, os.MkdirAll(v.staging(n), 0o750))
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	_, err := n.csi.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
		VolumeId: v.id, StagingTargetPath: v.staging(n), VolumeCapability: v.capability(), VolumeContext: v.context, Secrets: v.secrets,
	})
	return err
}

// publish is SetUpAt: kubelet makes the parent and its own vol_data.json, and
// leaves the target to the driver.
func (n *node) publish(v *volume, pod string) error { return n.publishAs(v, pod, false) }

// publishAs is a publish of an orchestrator that may ask for deferral itself.
func (n *node) publishAs(v *volume, pod string, requested bool) error {
	parent := filepath.Dir(v.target(n, pod))
	check.Must(n.t, os.MkdirAll(parent, 0o750))
	check.Must(n.t, os.WriteFile(parent+"/vol_data.json", []byte(`{"driverName":"`+driverName+`"}`), 0o600))
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	with := map[string]string{"csi.storage.k8s.io/pod.uid": pod}
	for key, value := range v.context {
		with[key] = value
	}
	req := &csi.NodePublishVolumeRequest{
		VolumeId: v.id, StagingTargetPath: v.staging(n), TargetPath: v.target(n, pod), VolumeCapability: v.capability(),
		VolumeContext: with, Secrets: v.secrets, Readonly: v.readOnly,
	}
	if requested {
		csidefer.SetRequested(req)
	}
	_, err := n.csi.NodePublishVolume(ctx, req)
	return err
}

// unpublish is TearDownAt: kubelet removes what it made itself.
func (n *node) unpublish(v *volume, pod string) error {
	target := v.target(n, pod)
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	_, err := n.csi.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: v.id, TargetPath: target})
	if err != nil {
		return err
	}
	if err := os.Remove(target); err != nil && !errors.Is(err, os.ErrNotExist) && !n.foreign[target] {
		n.t.Errorf("kubelet cannot remove the target: %v", err)
	}
	_ = os.Remove(filepath.Dir(target) + "/vol_data.json")
	for dir := filepath.Dir(target); dir != n.Kubelet; dir = filepath.Dir(dir) {
		if os.Remove(dir) != nil {
			break
		}
	}
	return nil
}

// unstage is UnmountDevice.
func (n *node) unstage(v *volume) error {
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	_, err := n.csi.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging(n)})
	if err == nil {
		_ = os.Remove(v.staging(n))
	}
	return err
}

func (n *node) stats(v *volume, pod string) (*csi.NodeGetVolumeStatsResponse, error) {
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	return n.csi.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: v.id, VolumePath: v.target(n, pod)})
}

func (n *node) expand(v *volume, where string, size int64) (*csi.NodeExpandVolumeResponse, error) {
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	return n.csi.NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{
		VolumeId: v.id, VolumePath: where, StagingTargetPath: v.staging(n), VolumeCapability: v.capability(),
		CapacityRange: &csi.CapacityRange{RequiredBytes: size},
	})
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
