package csidriver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
)

// driver makes volumes and snapshots by a driver's own calls.
type driver struct {
	controller csi.ControllerClient
	node       csi.NodeClient
	metadata   csi.SnapshotMetadataClient
	opts       Options
	run        string // in all names
	dir        string
	advertised bool
	able       map[csi.ControllerServiceCapability_RPC_Type]bool
	nodeCan    map[csi.NodeServiceCapability_RPC_Type]bool
	info       *csi.NodeGetInfoResponse
	undo       []func(context.Context) error // in the opposite order
}

func newDriver(ctx context.Context, conn grpc.ClientConnInterface, opts Options) (*driver, error) {
	d := &driver{
		controller: csi.NewControllerClient(conn), node: csi.NewNodeClient(conn), metadata: csi.NewSnapshotMetadataClient(conn), opts: opts,
		run: fmt.Sprintf("crust-conformance-%d", time.Now().UnixNano()), able: make(map[csi.ControllerServiceCapability_RPC_Type]bool),
		nodeCan: make(map[csi.NodeServiceCapability_RPC_Type]bool),
	}
	plugin, err := csi.NewIdentityClient(conn).GetPluginCapabilities(ctx, &csi.GetPluginCapabilitiesRequest{})
	if err != nil {
		return nil, fmt.Errorf("GetPluginCapabilities: %w", err)
	}
	for _, one := range plugin.GetCapabilities() {
		d.advertised = d.advertised || one.GetService().GetType() == csi.PluginCapability_Service_SNAPSHOT_METADATA_SERVICE
	}
	controller, err := d.controller.ControllerGetCapabilities(ctx, &csi.ControllerGetCapabilitiesRequest{})
	if err != nil {
		return nil, fmt.Errorf("ControllerGetCapabilities: %w", err)
	}
	for _, one := range controller.GetCapabilities() {
		d.able[one.GetRpc().GetType()] = true
	}
	node, err := d.node.NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{})
	if err != nil {
		return nil, fmt.Errorf("NodeGetCapabilities: %w", err)
	}
	for _, one := range node.GetCapabilities() {
		d.nodeCan[one.GetRpc().GetType()] = true
	}
	if d.info, err = d.node.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{}); err != nil {
		return nil, fmt.Errorf("NodeGetInfo: %w", err)
	}
	d.dir, err = os.MkdirTemp(opts.Dir, "crust-conformance-")
	return d, err
}

// block is the unit of what is written and looked for.
const block = 4096

// content is the byte with which each block is filled that is not zero.
type content map[int64]byte

func (c content) covered(by []blockRange, from int64) error {
	for n := range c {
		if n*block >= from && !contains(by, n*block, (n+1)*block) {
			return fmt.Errorf("the block of %d bytes at %d is not named", block, n*block)
		}
	}
	return nil
}

// changes are the blocks in which a content is another one than an earlier one.
func (c content) changes(base content) content {
	all := make(content)
	for n, fill := range c {
		if base[n] != fill {
			all[n] = fill
		}
	}
	for n := range base {
		if _, there := c[n]; !there {
			all[n] = 0
		}
	}
	return all
}

type volume struct {
	d        *driver
	id, name string
	access   *csi.VolumeCapability
	context  map[string]string
	capacity int64
	// staging and attached are set while it is attached to the node.
	staging  string
	attached map[string]string
}

var blockAccess = &csi.VolumeCapability{
	AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
	AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
}

func (d *driver) volume(ctx context.Context, name string, access *csi.VolumeCapability) (*volume, error) {
	req := &csi.CreateVolumeRequest{
		Name: d.run + "-" + name, CapacityRange: &csi.CapacityRange{RequiredBytes: d.opts.Size},
		VolumeCapabilities: []*csi.VolumeCapability{access}, Parameters: d.opts.Parameters,
	}
	if at := d.info.GetAccessibleTopology(); at != nil {
		req.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: []*csi.Topology{at}, Preferred: []*csi.Topology{at}}
	}
	reply, err := d.controller.CreateVolume(ctx, req)
	if err != nil {
		return nil, fmt.Errorf("CreateVolume: %w", err)
	}
	made := reply.GetVolume()
	v := &volume{d: d, id: made.GetVolumeId(), name: name, access: access, context: made.GetVolumeContext(), capacity: max(made.GetCapacityBytes(), d.opts.Size)}
	d.undo = append(d.undo, func(ctx context.Context) error {
		_, err := d.controller.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: v.id})
		return err
	})
	return v, nil
}

// write publishes the volume, fills blocks, and unpublishes it, so that a snapshot needs no freeze.
func (v *volume) write(ctx context.Context, blocks content) (err error) {
	target := filepath.Join(v.d.dir, v.name)
	down, err := v.publish(ctx, target)
	defer func() {
		ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
		defer cancel()
		for _, undo := range slices.Backward(down) {
			err = errors.Join(err, undo(ending))
		}
	}()
	if err != nil {
		return err
	}
	device, err := os.OpenFile(target, os.O_RDWR, 0) //nolint:gosec // in the run's directory
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, device.Close()) }()
	for n, fill := range blocks {
		if _, err := device.WriteAt(slices.Repeat([]byte{fill}, block), n*block); err != nil {
			return err
		}
	}
	return device.Sync()
}

// attach makes the volume known to the node. down undoes that, also after an error.
func (v *volume) attach(ctx context.Context) (down []func(context.Context) error, err error) {
	if v.d.able[csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME] {
		reply, err := v.d.controller.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{
			VolumeId: v.id, NodeId: v.d.info.GetNodeId(), VolumeCapability: v.access, VolumeContext: v.context,
		})
		if err != nil {
			return down, fmt.Errorf("ControllerPublishVolume: %w", err)
		}
		v.attached = reply.GetPublishContext()
		down = append(down, func(ctx context.Context) error {
			_, err := v.d.controller.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: v.id, NodeId: v.d.info.GetNodeId()})
			return err
		})
	}
	if !v.d.nodeCan[csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME] {
		return down, nil
	}
	v.staging = filepath.Join(v.d.dir, "staging", v.name)
	if err := os.MkdirAll(v.staging, 0o700); err != nil {
		return down, err
	}
	down = append(down, v.unstage)
	if _, err := v.d.node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
		VolumeId: v.id, StagingTargetPath: v.staging, VolumeCapability: v.access, VolumeContext: v.context, PublishContext: v.attached,
	}); err != nil {
		return down, fmt.Errorf("NodeStageVolume: %w", err)
	}
	return down, nil
}

func (v *volume) unstage(ctx context.Context) error {
	_, err := v.d.node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging})
	return err
}

func (v *volume) request(target string) *csi.NodePublishVolumeRequest {
	return &csi.NodePublishVolumeRequest{
		VolumeId: v.id, StagingTargetPath: v.staging, TargetPath: target, VolumeCapability: v.access,
		VolumeContext: v.context, PublishContext: v.attached,
	}
}

func (v *volume) publish(ctx context.Context, target string) (down []func(context.Context) error, err error) {
	if down, err = v.attach(ctx); err != nil {
		return down, err
	}
	down = append(down, func(ctx context.Context) error {
		_, err := v.d.node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: v.id, TargetPath: target})
		return err
	})
	if _, err = v.d.node.NodePublishVolume(ctx, v.request(target)); err != nil {
		return down, fmt.Errorf("NodePublishVolume: %w", err)
	}
	return down, nil
}

// readyPause is between two questions whether a snapshot is ready.
const readyPause = time.Second

// snapshot makes one, and waits until it can be used.
func (v *volume) snapshot(ctx context.Context, name string) (id string, err error) {
	req := &csi.CreateSnapshotRequest{Name: v.d.run + "-" + name, SourceVolumeId: v.id}
	for {
		reply, err := v.d.controller.CreateSnapshot(ctx, req)
		if err != nil {
			return "", fmt.Errorf("CreateSnapshot: %w", err)
		}
		if id == "" {
			id = reply.GetSnapshot().GetSnapshotId()
			v.d.undo = append(v.d.undo, func(ctx context.Context) error {
				_, err := v.d.controller.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: id})
				return err
			})
		}
		if reply.GetSnapshot().GetReadyToUse() {
			return id, nil
		}
		select {
		case <-time.After(readyPause):
		case <-ctx.Done():
			return "", fmt.Errorf("snapshot %s is not ready: %w", id, ctx.Err())
		}
	}
}
