package csivolume

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// Volume is a volume as kubelet knows it, for one pod.
type Volume struct {
	*Client
	T rig.T
	// Name is the PersistentVolume's, ID the driver's; a raw block volume has no FS.
	Name, ID, FS     string
	Mode             csi.VolumeCapability_AccessMode_Mode
	Flags            []string
	Context, Secrets map[string]string
	// ReadOnly has it published so, and Ask has kubelet ask for deferral itself.
	ReadOnly, Ask bool
	// Pod is the UID of the pod that it is published for.
	Pod, Staging, Target string
}

// For has the volume published for a pod from now on.
func (v *Volume) For(pod string) { v.Pod, v.Target = pod, v.TargetOf(pod) }

// As is the volume as a pod has it.
func (v *Volume) As(pod string) *Volume {
	other := *v
	other.For(pod)
	return &other
}

// TargetOf is where a pod has it.
func (v *Volume) TargetOf(pod string) string {
	return v.Kubelet + "/pods/" + pod + "/volumes/kubernetes.io~csi/" + v.Name + "/mount"
}

// Access is what is asked of the driver.
func (v *Volume) Access() *csi.VolumeCapability {
	access := rig.BlockAccess()
	if v.FS != "" {
		access = rig.MountAccess(v.FS, v.Flags...)
	}
	access.AccessMode.Mode = v.Mode
	return access
}

// Publish is all that kubelet calls before it makes a sandbox.
func (v *Volume) Publish() {
	v.T.Helper()
	check.Must(v.T, v.Stage())
	check.Must(v.T, v.TryPublish())
}

// Stage is kubelet's call once for the node.
func (v *Volume) Stage() error {
	v.T.Helper()
	check.Must(v.T, os.MkdirAll(v.Host+v.Staging, 0o750))
	_, err := v.Node.NodeStageVolume(context.Background(), &csi.NodeStageVolumeRequest{
		VolumeId: v.ID, StagingTargetPath: v.Staging, VolumeCapability: v.Access(), VolumeContext: v.Context, Secrets: v.Secrets,
	})
	return err
}

// TryPublish is kubelet's call for one pod: it makes the directory and its own
// vol_data.json, and leaves the target to the driver.
func (v *Volume) TryPublish() error {
	v.T.Helper()
	dir := filepath.Dir(v.Host + v.Target)
	check.Must(v.T, os.MkdirAll(dir, 0o750))
	check.Must(v.T, os.WriteFile(dir+"/vol_data.json", []byte(`{"driverName":"`+v.Driver+`"}`), 0o600))
	with := map[string]string{"csi.storage.k8s.io/pod.uid": v.Pod}
	maps.Copy(with, v.Context)
	request := &csi.NodePublishVolumeRequest{
		VolumeId: v.ID, StagingTargetPath: v.Staging, TargetPath: v.Target, VolumeCapability: v.Access(),
		VolumeContext: with, Secrets: v.Secrets, Readonly: v.ReadOnly,
	}
	if v.Ask {
		csidefer.SetRequested(request)
	}
	_, err := v.Node.NodePublishVolume(context.Background(), request)
	return err
}

// TryUnpublish is kubelet's call when it takes the sandbox to be removed.
func (v *Volume) TryUnpublish() error {
	_, err := v.Node.NodeUnpublishVolume(context.Background(), &csi.NodeUnpublishVolumeRequest{VolumeId: v.ID, TargetPath: v.Target})
	return err
}

// TearDown is that call, after which kubelet removes what it has made.
func (v *Volume) TearDown() error {
	v.T.Helper()
	if err := v.TryUnpublish(); err != nil {
		return err
	}
	target := v.Host + v.Target
	err := os.Remove(target)
	check.That(v.T, err == nil || errors.Is(err, os.ErrNotExist), "kubelet cannot remove the target: %v", err)
	_ = os.Remove(filepath.Dir(target) + "/vol_data.json")
	for dir := filepath.Dir(target); dir != v.Host+v.Kubelet && os.Remove(dir) == nil; dir = filepath.Dir(dir) {
	}
	return nil
}

// Unpublish is what kubelet calls after it has removed the sandbox, again while it may.
func (v *Volume) Unpublish() {
	v.T.Helper()
	check.Retried(v.T, "unpublish", v.TearDown)
}

// Unstage is kubelet's call when no pod has it.
func (v *Volume) Unstage() error {
	_, err := v.Node.NodeUnstageVolume(context.Background(), &csi.NodeUnstageVolumeRequest{VolumeId: v.ID, StagingTargetPath: v.Staging})
	if err == nil {
		_ = os.Remove(v.Host + v.Staging)
	}
	return err
}

// Delete is the rest: unstage it and have the driver delete it.
func (v *Volume) Delete() {
	v.T.Helper()
	check.Must(v.T, v.Unstage())
	check.Must(v.T, os.RemoveAll(filepath.Dir(v.Host+v.Target)))
	check.Must(v.T, v.Remove())
}

// Remove has the driver delete it.
func (v *Volume) Remove() error {
	_, err := v.Controller.DeleteVolume(context.Background(), &csi.DeleteVolumeRequest{VolumeId: v.ID})
	return err
}

// Grow has the driver grow the device, and kubelet the filesystem.
func (v *Volume) Grow(size int64) error {
	v.T.Helper()
	check.Must(v.T, check.Err(v.Controller.ControllerExpandVolume(context.Background(), &csi.ControllerExpandVolumeRequest{
		VolumeId: v.ID, CapacityRange: &csi.CapacityRange{RequiredBytes: size}, VolumeCapability: v.Access(),
	})))
	reply, err := v.Expand(v.Target, size)
	if err == nil && reply.GetCapacityBytes() < size {
		err = fmt.Errorf("it was grown to %d, not %d", reply.GetCapacityBytes(), size)
	}
	return err
}

// Expand is kubelet's call for the filesystem.
func (v *Volume) Expand(path string, size int64) (*csi.NodeExpandVolumeResponse, error) {
	return v.Node.NodeExpandVolume(context.Background(), &csi.NodeExpandVolumeRequest{
		VolumeId: v.ID, VolumePath: path, StagingTargetPath: v.Staging, VolumeCapability: v.Access(),
		CapacityRange: &csi.CapacityRange{RequiredBytes: size},
	})
}

// Stats is what kubelet asks for each minute.
func (v *Volume) Stats() (*csi.NodeGetVolumeStatsResponse, error) {
	return v.Node.NodeGetVolumeStats(context.Background(), &csi.NodeGetVolumeStatsRequest{VolumeId: v.ID, VolumePath: v.Target})
}

// Usage is what a filesystem has, in bytes.
type Usage struct{ Total, Used, Available int64 }

// WantUsage waits until stats are what is seen inside.
func (v *Volume) WantUsage(inside func() Usage) {
	v.T.Helper()
	check.Succeeds(v.T, "stats are what is seen inside", func() error {
		reply, err := v.Stats()
		if err != nil {
			return err
		}
		want := inside()
		for _, u := range reply.GetUsage() {
			if u.GetUnit() == csi.VolumeUsage_BYTES && want == (Usage{u.GetTotal(), u.GetUsed(), u.GetAvailable()}) {
				return nil
			}
		}
		return fmt.Errorf("stats are %v; seen inside is %+v", reply.GetUsage(), want)
	})
}

// Health is all that is wrong with the volume.
func (v *Volume) Health() ([]*csi.VolumeHealth_VolumeHealthEntry, error) {
	reply, err := v.Node.NodeGetVolumeHealth(context.Background(), &csi.NodeGetVolumeHealthRequest{
		VolumeId: v.ID, VolumePublishPath: v.Target, StagingTargetPath: v.Staging,
	})
	return reply.GetVolumeHealth().GetHealthStatuses(), err
}

// Snapshot takes one of the volume and gives its id.
func (v *Volume) Snapshot(name string) (id string, err error) {
	made, err := v.Controller.CreateSnapshot(context.Background(), &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: v.ID})
	return made.GetSnapshot().GetSnapshotId(), err
}

// DeleteSnapshot deletes one.
func (v *Volume) DeleteSnapshot(id string) {
	v.T.Helper()
	check.Must(v.T, check.Err(v.Controller.DeleteSnapshot(context.Background(), &csi.DeleteSnapshotRequest{SnapshotId: id})))
}
