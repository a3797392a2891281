package csivolume

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// callTime bounds one call. Kubelet waits two minutes.
const callTime = time.Minute

// Volume is a volume of the driver's, for one pod.
type Volume struct {
	*Driver
	T rig.T
	// Pod is the UID of the pod that it is published for.
	Pod, ID, FS     string
	Staging, Target string
	// ReadOnly has it published so.
	ReadOnly bool

	name    string
	context map[string]string
}

// Create has the driver make a volume.
func (d *Driver) Create(t rig.T, name, fs string, size int64) *Volume {
	t.Helper()
	return d.Restore(t, name, fs, size, nil)
}

// Restore has the driver make a volume out of something, such as a snapshot.
func (d *Driver) Restore(t rig.T, name, fs string, size int64, from *csi.VolumeContentSource) *Volume {
	t.Helper()
	v := &Volume{
		Driver: d, T: t, FS: fs, name: name,
		Staging: d.daemon.Kubelet + "/plugins/kubernetes.io/csi/" + rig.DriverName + "/" + name + "/globalmount",
	}
	v.For("pod-" + name)
	d.Wait(t)
	ctx, cancel := v.ctx()
	defer cancel()
	reply, err := d.Controller.CreateVolume(ctx, &csi.CreateVolumeRequest{
		Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: size}, VolumeCapabilities: []*csi.VolumeCapability{rig.MountAccess(fs)},
		VolumeContentSource: from,
	})
	check.Must(t, err)
	v.ID, v.context = reply.GetVolume().GetVolumeId(), reply.GetVolume().GetVolumeContext()
	return v
}

// For has the volume published for a pod from now on.
func (v *Volume) For(pod string) {
	v.Pod, v.Target = pod, v.daemon.Kubelet+"/pods/"+pod+"/volumes/kubernetes.io~csi/"+v.name+"/mount"
}

func (v *Volume) ctx() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(v.T.Context()), callTime)
}

// Publish is all that kubelet calls before it makes a sandbox.
func (v *Volume) Publish() {
	v.T.Helper()
	check.Must(v.T, os.MkdirAll(v.Staging, 0o750))
	ctx, cancel := v.ctx()
	defer cancel()
	_, err := v.Node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
		VolumeId: v.ID, StagingTargetPath: v.Staging, VolumeCapability: rig.MountAccess(v.FS), VolumeContext: v.context,
	})
	check.Must(v.T, err)
	check.Must(v.T, v.TryPublish())
}

// TryPublish is kubelet's call for one pod.
func (v *Volume) TryPublish() error {
	v.T.Helper()
	check.Must(v.T, os.MkdirAll(filepath.Dir(v.Target), 0o750))
	check.Must(v.T, os.WriteFile(filepath.Dir(v.Target)+"/vol_data.json", []byte(`{"driverName":"`+rig.DriverName+`"}`), 0o600))
	with := map[string]string{"csi.storage.k8s.io/pod.uid": v.Pod}
	maps.Copy(with, v.context)
	ctx, cancel := v.ctx()
	defer cancel()
	_, err := v.Node.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId: v.ID, StagingTargetPath: v.Staging, TargetPath: v.Target, VolumeCapability: rig.MountAccess(v.FS), VolumeContext: with, Readonly: v.ReadOnly,
	})
	return err
}

// TryUnpublish is kubelet's call when it takes the sandbox to be removed.
func (v *Volume) TryUnpublish() error {
	ctx, cancel := v.ctx()
	defer cancel()
	_, err := v.Node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: v.ID, TargetPath: v.Target})
	return err
}

// Unpublish is what kubelet calls after it has removed the sandbox, again while it may.
func (v *Volume) Unpublish() {
	v.T.Helper()
	check.Eventually(v.T, "unpublish", func() bool {
		err := v.TryUnpublish()
		if code := status.Code(err); err != nil && code != codes.Aborted && code != codes.Unavailable {
			v.T.Fatal(err)
		}
		return err == nil
	})
	if err := os.Remove(v.Target); err != nil && !errors.Is(err, os.ErrNotExist) {
		v.T.Errorf("kubelet cannot remove the target: %v", err)
	}
}

// Delete is the rest: unstage it and have the driver delete it.
func (v *Volume) Delete() {
	v.T.Helper()
	ctx, cancel := v.ctx()
	defer cancel()
	_, err := v.Node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: v.ID, StagingTargetPath: v.Staging})
	check.Must(v.T, err)
	check.Must(v.T, os.RemoveAll(filepath.Dir(v.Target)))
	_, err = v.Controller.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: v.ID})
	check.Must(v.T, err)
}

// Grow has the driver grow the device, and kubelet the filesystem.
func (v *Volume) Grow(size int64) error {
	v.T.Helper()
	ctx, cancel := v.ctx()
	defer cancel()
	limit := &csi.CapacityRange{RequiredBytes: size}
	_, err := v.Controller.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{
		VolumeId: v.ID, CapacityRange: limit, VolumeCapability: rig.MountAccess(v.FS),
	})
	check.Must(v.T, err)
	reply, err := v.Node.NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{
		VolumeId: v.ID, VolumePath: v.Target, StagingTargetPath: v.Staging, VolumeCapability: rig.MountAccess(v.FS), CapacityRange: limit,
	})
	if err == nil && reply.GetCapacityBytes() < size {
		err = fmt.Errorf("it was grown to %d, not %d", reply.GetCapacityBytes(), size)
	}
	return err
}

// Stats is what kubelet asks for each minute.
func (v *Volume) Stats() (*csi.NodeGetVolumeStatsResponse, error) {
	ctx, cancel := v.ctx()
	defer cancel()
	return v.Node.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: v.ID, VolumePath: v.Target})
}

// Health is all that is wrong with the volume.
func (v *Volume) Health() ([]*csi.VolumeHealth_VolumeHealthEntry, error) {
	ctx, cancel := v.ctx()
	defer cancel()
	reply, err := v.Node.NodeGetVolumeHealth(ctx, &csi.NodeGetVolumeHealthRequest{
		VolumeId: v.ID, VolumePublishPath: v.Target, StagingTargetPath: v.Staging,
	})
	return reply.GetVolumeHealth().GetHealthStatuses(), err
}

// Snapshot takes one of the volume and gives its id.
func (v *Volume) Snapshot(name string) (id string, err error) {
	ctx, cancel := v.ctx()
	defer cancel()
	made, err := v.Controller.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: v.ID})
	return made.GetSnapshot().GetSnapshotId(), err
}

// DeleteSnapshot deletes one.
func (v *Volume) DeleteSnapshot(id string) {
	v.T.Helper()
	ctx, cancel := v.ctx()
	defer cancel()
	_, err := v.Controller.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: id})
	check.Must(v.T, err)
}
