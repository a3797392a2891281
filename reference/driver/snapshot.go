package driver

import (
	"context"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// snapshotID derives the id of a snapshot from its name, as volumeID does for a volume.
func snapshotID(name string) string { return "snap-" + fileName(name)[:32] }

// CreateSnapshot makes a snapshot, also of a volume in use.
func (c *controller) CreateSnapshot(ctx context.Context, req *csi.CreateSnapshotRequest) (*csi.CreateSnapshotResponse, error) {
	if err := checkName(req.GetName()); err != nil {
		return nil, err
	}
	if req.GetSourceVolumeId() == "" {
		return nil, status.Error(codes.InvalidArgument, "source_volume_id is missing")
	}
	if err := checkParameters(req.GetParameters()); err != nil {
		return nil, err
	}
	of := source{Volume: req.GetSourceVolumeId()}
	id := snapshotID(req.GetName())
	release, err := c.locks.take(ctx, id, of.Volume)
	if err != nil {
		return nil, err
	}
	defer release()
	r, err := c.pool.existing(id)
	if err != nil {
		return nil, err
	}
	if r != nil && r.Source != of {
		return nil, status.Errorf(codes.AlreadyExists, "snapshot %q exists and is of %v, not of %v", id, r.Source, of)
	}
	if r == nil {
		if r, err = c.snapshot(ctx, id, of); err != nil {
			return nil, err
		}
	}
	return &csi.CreateSnapshotResponse{Snapshot: describeSnapshot(r)}, nil
}

func (c *controller) snapshot(ctx context.Context, id string, of source) (*record, error) {
	from, err := c.cloner.find(of)
	if err != nil {
		return nil, err
	}
	began := time.Now()
	r := &record{Version: recordVersion, ID: id, Capacity: from.Capacity, Source: of, Snapshot: &snapshot{}}
	if err := c.cloner.provision(ctx, from, r); err != nil {
		return nil, err
	}
	c.log.Info("made a snapshot", zap.String("snapshot", id), zap.String("volume", of.Volume),
		zap.Stringer("consistent", r.Snapshot), zap.Duration("took", time.Since(began)))
	return r, nil
}

func describeSnapshot(r *record) *csi.Snapshot {
	return &csi.Snapshot{
		SnapshotId: r.ID, SourceVolumeId: r.Source.Volume, SizeBytes: r.Capacity, CreationTime: timestamppb.New(r.Created), ReadyToUse: true,
		GroupSnapshotId: r.Snapshot.Group,
	}
}

// findSnapshot returns the record of a snapshot, which may be unfinished, or nil.
func (c *controller) findSnapshot(id string) (*record, error) {
	if id == "" {
		return nil, status.Error(codes.InvalidArgument, "snapshot_id is missing")
	}
	r, err := c.pool.store.load(id)
	if err != nil || r == nil || r.Snapshot == nil {
		return nil, err
	}
	return r, nil
}

// DeleteSnapshot removes a snapshot. Volumes made from it do not depend on it.
func (c *controller) DeleteSnapshot(ctx context.Context, req *csi.DeleteSnapshotRequest) (*csi.DeleteSnapshotResponse, error) {
	release, err := c.locks.take(ctx, req.GetSnapshotId())
	if err != nil {
		return nil, err
	}
	defer release()
	r, err := c.findSnapshot(req.GetSnapshotId())
	if err != nil || r == nil {
		return &csi.DeleteSnapshotResponse{}, err
	}
	if r.Snapshot.Group != "" {
		return nil, status.Errorf(codes.InvalidArgument, "snapshot %q is a part of the group snapshot %q: delete that", r.ID, r.Snapshot.Group)
	}
	return &csi.DeleteSnapshotResponse{}, c.pool.erase(r)
}

// GetSnapshot describes one snapshot.
func (c *controller) GetSnapshot(_ context.Context, req *csi.GetSnapshotRequest) (*csi.GetSnapshotResponse, error) {
	r, err := c.findSnapshot(req.GetSnapshotId())
	if err != nil {
		return nil, err
	}
	if r == nil || !r.Ready {
		return nil, status.Errorf(codes.NotFound, "there is no snapshot %q on node %s", req.GetSnapshotId(), c.config.NodeID)
	}
	return &csi.GetSnapshotResponse{Snapshot: describeSnapshot(r)}, nil
}
