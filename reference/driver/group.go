package driver

import (
	"context"
	"errors"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// groupController serves CSI's GroupController: snapshots of several volumes at one moment.
type groupController struct {
	csi.UnimplementedGroupControllerServer

	locks  *locks
	groups *groups
}

// mostVolumes bounds a group, as each volume of it costs two processes while it is frozen.
const mostVolumes = 32

// GroupControllerGetCapabilities lists what the group controller can do.
func (g *groupController) GroupControllerGetCapabilities(context.Context, *csi.GroupControllerGetCapabilitiesRequest) (
	*csi.GroupControllerGetCapabilitiesResponse, error,
) {
	reply := &csi.GroupControllerGetCapabilitiesResponse{}
	if g.groups.cloner.able() {
		reply.Capabilities = []*csi.GroupControllerServiceCapability{{
			Type: &csi.GroupControllerServiceCapability_Rpc{Rpc: &csi.GroupControllerServiceCapability_RPC{
				Type: csi.GroupControllerServiceCapability_RPC_CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT,
			}},
		}}
	}
	return reply, nil
}

// CreateVolumeGroupSnapshot makes snapshots of volumes, also of those in use: all or none.
func (g *groupController) CreateVolumeGroupSnapshot(ctx context.Context, req *csi.CreateVolumeGroupSnapshotRequest) (
	*csi.CreateVolumeGroupSnapshotResponse, error,
) {
	want, err := readGroup(req)
	if err != nil {
		return nil, err
	}
	release, err := g.locks.take(ctx, slices.Concat([]string{want.ID}, want.members(), want.Volumes)...)
	if err != nil {
		return nil, err
	}
	defer release()
	r, err := g.groups.existing(want.ID)
	if err != nil {
		return nil, err
	}
	if r != nil && !slices.Equal(r.Volumes, want.Volumes) {
		return nil, status.Errorf(codes.AlreadyExists, "group snapshot %q exists and is of the volumes %q, not of %q", r.ID, r.Volumes, want.Volumes)
	}
	if r == nil {
		r = want
		if err := g.groups.create(ctx, r); err != nil {
			return nil, err
		}
	}
	made, err := g.describe(r)
	return &csi.CreateVolumeGroupSnapshotResponse{GroupSnapshot: made}, err
}

// readGroup returns the record of the group that the request asks for.
func readGroup(req *csi.CreateVolumeGroupSnapshotRequest) (*record, error) {
	if err := errors.Join(checkName(req.GetName()), checkParameters(req.GetParameters())); err != nil {
		return nil, err
	}
	volumes := slices.Compact(slices.Sorted(slices.Values(req.GetSourceVolumeIds())))
	switch {
	case len(volumes) == 0 || volumes[0] == "":
		return nil, status.Error(codes.InvalidArgument, "source_volume_ids are missing, or one of them is empty")
	case len(volumes) > mostVolumes:
		return nil, status.Errorf(codes.InvalidArgument, "source_volume_ids has %d volumes, at most are %d", len(volumes), mostVolumes)
	}
	return &record{Version: recordVersion, ID: "group-" + fileName(req.GetName())[:32], Volumes: volumes}, nil
}

func (g *groupController) describe(r *record) (*csi.VolumeGroupSnapshot, error) {
	members, err := g.groups.complete(r)
	reply := &csi.VolumeGroupSnapshot{GroupSnapshotId: r.ID, CreationTime: timestamppb.New(r.Created), ReadyToUse: true}
	for _, m := range members {
		reply.Snapshots = append(reply.Snapshots, describeSnapshot(m))
	}
	return reply, err
}

// find locks and returns a group, or nil if there is none. If the request names snapshots,
// they must be those of the group.
func (g *groupController) find(ctx context.Context, req interface {
	GetGroupSnapshotId() string
	GetSnapshotIds() []string
}) (r *record, release func(), err error) {
	id := req.GetGroupSnapshotId()
	if id == "" {
		return nil, nil, status.Error(codes.InvalidArgument, "group_snapshot_id is missing")
	}
	if release, err = g.locks.take(ctx, id); err != nil {
		return nil, nil, err
	}
	r, err = g.groups.store.load(id)
	if err == nil && r != nil {
		err = checkMembers(r, req.GetSnapshotIds())
	}
	if err != nil {
		release()
	}
	return r, release, err
}

func checkMembers(r *record, named []string) error {
	members := slices.Sorted(slices.Values(r.members()))
	if len(named) > 0 && !slices.Equal(slices.Sorted(slices.Values(named)), members) {
		return status.Errorf(codes.InvalidArgument, "snapshot_ids: group snapshot %q has %q, not %q", r.ID, members, named)
	}
	return nil
}

// DeleteVolumeGroupSnapshot removes a group with all its snapshots.
func (g *groupController) DeleteVolumeGroupSnapshot(ctx context.Context, req *csi.DeleteVolumeGroupSnapshotRequest) (
	*csi.DeleteVolumeGroupSnapshotResponse, error,
) {
	r, release, err := g.find(ctx, req)
	if err != nil {
		return nil, err
	}
	defer release()
	if r == nil {
		return &csi.DeleteVolumeGroupSnapshotResponse{}, nil
	}
	// All calls lock a group before its snapshots.
	releaseAll, err := g.locks.take(ctx, r.members()...)
	if err != nil {
		return nil, err
	}
	defer releaseAll()
	return &csi.DeleteVolumeGroupSnapshotResponse{}, g.groups.erase(r)
}

// GetVolumeGroupSnapshot describes one group.
func (g *groupController) GetVolumeGroupSnapshot(ctx context.Context, req *csi.GetVolumeGroupSnapshotRequest) (
	*csi.GetVolumeGroupSnapshotResponse, error,
) {
	r, release, err := g.find(ctx, req)
	if err != nil {
		return nil, err
	}
	defer release()
	if r == nil || !r.Ready {
		return nil, status.Errorf(codes.NotFound, "there is no group snapshot %q on node %s", req.GetGroupSnapshotId(), g.groups.pool.config.NodeID)
	}
	found, err := g.describe(r)
	return &csi.GetVolumeGroupSnapshotResponse{GroupSnapshot: found}, err
}
