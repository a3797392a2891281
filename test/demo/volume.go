package main

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-proxy/crust-proxy/test/rig"
)

// volume is the demo's PersistentVolume.
type volume struct {
	id      string
	staging string
}

func capability() *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: "ext4"}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
	}
}

// create has the driver make the volume, as a provisioner does, and stage it, as
// kubelet does.
func (p *play) create(ctx context.Context) error {
	reply, err := csi.NewControllerClient(p.conn).CreateVolume(ctx, &csi.CreateVolumeRequest{
		Name: "data", CapacityRange: &csi.CapacityRange{RequiredBytes: diskSize}, VolumeCapabilities: []*csi.VolumeCapability{capability()},
	})
	if err != nil {
		return err
	}
	p.volume = volume{
		id: reply.GetVolume().GetVolumeId(), staging: p.dir + "/kubelet/plugins/kubernetes.io/csi/" + driverName + "/data/globalmount",
	}
	if err := os.MkdirAll(p.volume.staging, 0o750); err != nil {
		return err
	}
	_, err = p.csi().NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
		VolumeId: p.volume.id, StagingTargetPath: p.volume.staging, VolumeCapability: capability(),
	})
	return err
}

// publish is kubelet's call for a pod.
func (p *play) publish(ctx context.Context, target string) error {
	_, err := p.csi().NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId: p.volume.id, StagingTargetPath: p.volume.staging, TargetPath: target, VolumeCapability: capability(),
	})
	return err
}

func (p *play) unpublish(ctx context.Context, target string) error {
	_, err := p.csi().NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: p.volume.id, TargetPath: target})
	return err
}

// remove gives the volume back to the driver and has it deleted.
func (p *play) remove(ctx context.Context) error {
	_, err := p.csi().NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: p.volume.id, StagingTargetPath: p.volume.staging})
	if err != nil {
		return err
	}
	_, err = csi.NewControllerClient(p.conn).DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: p.volume.id})
	return err
}

// handedOver reads which device the sandbox will find, and over which image the
// driver attached it.
func (n *node) handedOver(target string) error {
	raw, err := os.ReadFile(filepath.Join(n.dir, "kata", base64.URLEncoding.EncodeToString([]byte(target)), "mountInfo.json"))
	if err != nil {
		return err
	}
	var info struct {
		Device string `json:"device"`
	}
	if err := json.Unmarshal(raw, &info); err != nil {
		return err
	}
	n.disk = info.Device
	backing, attached := rig.Loops("")[n.disk]
	if !attached {
		return fmt.Errorf("%s is no loop device over an image", n.disk)
	}
	n.image = filepath.Base(backing)
	return nil
}
