package driver

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
)

// CreateSnapshot makes a snapshot, also of a volume in use.
func (c *controller) CreateSnapshot(ctx context.Context, req *csi.CreateSnapshotRequest) (*csi.CreateSnapshotResponse, error) {
	if err := cmp.Or(checkName(req.GetName()), checkParameters(req.GetParameters())); err != nil {
		return nil, err
	}
	if req.GetSourceVolumeId() == "" {
		return nil, status.Error(codes.InvalidArgument, "source_volume_id is missing")
	}
	of := source{Volume: req.GetSourceVolumeId()}
	id := newID("snap-", req.GetName())
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
		return nil, status.Errorf(codes.AlreadyExists, "snapshot %q exists and is of %v, not of %v", r.ID, r.Source, of)
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
	c.config.Log.Info("made a snapshot", zap.String("snapshot", id), zap.String("volume", of.Volume),
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
	r, release, err := c.locks.record(ctx, req.GetSnapshotId(), c.findSnapshot)
	if err != nil {
		return nil, err
	}
	defer release()
	if r == nil {
		return &csi.DeleteSnapshotResponse{}, nil
	}
	if r.Snapshot.Group != "" {
		return nil, status.Errorf(codes.InvalidArgument, "snapshot %q is a part of the group snapshot %q: delete that", r.ID, r.Snapshot.Group)
	}
	return &csi.DeleteSnapshotResponse{}, c.pool.erase(r)
}

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

// groups serves CSI's GroupController: snapshots of several volumes at one moment. It keeps a record for each group,
// beside the records of its members. The group's record is written before those of the members and removed after them.
// It alone says whether the group exists: if it is ready, its members become ready, else they are removed.
type groups struct {
	csi.UnimplementedGroupControllerServer

	locks  *locks
	pool   *pool
	cloner *cloner
	store  store
}

func (r *record) members() (ids []string) {
	for _, volume := range r.Volumes {
		ids = append(ids, r.ID+"-"+fileName(volume)[:32])
	}
	return ids
}

// create makes the snapshots of a group. If it fails, nothing is left.
func (g *groups) create(ctx context.Context, r *record) error {
	began := time.Now()
	var jobs []*job
	for i, member := range r.members() {
		of := source{Volume: r.Volumes[i]}
		from, err := g.cloner.find(of)
		if err != nil {
			return err
		}
		r.Capacity += from.Capacity
		jobs = append(jobs, &job{from: from, to: &record{
			Version: recordVersion, ID: member, Capacity: from.Capacity, Source: of, Snapshot: &snapshot{Group: r.ID},
		}})
	}
	if err := g.store.save(r); err != nil {
		return err
	}
	failpoint.Hit("driver-group-recorded")
	if err := g.fill(ctx, r, jobs); err != nil {
		return afterUndo(err, g.erase(r))
	}
	failpoint.Hit("driver-group-made")
	whole := &snapshot{Consistent: !slices.ContainsFunc(jobs, func(j *job) bool { return !j.to.Snapshot.Consistent })}
	g.pool.log.Info("made a group snapshot", zap.String("group", r.ID), zap.Strings("volumes", r.Volumes),
		zap.Stringer("consistent", whole), zap.Duration("took", time.Since(began)))
	return nil
}

// fill makes the members of a group, and then the group's record ready. The members' records are not ready yet.
func (g *groups) fill(ctx context.Context, r *record, jobs []*job) error {
	for _, j := range jobs {
		needed, err := g.cloner.needs(j.from, j.to)
		if err == nil {
			err = g.pool.reserve(j.to, j.to.Capacity, needed)
		}
		if err != nil {
			return err
		}
		failpoint.Hit("driver-recorded")
	}
	if err := g.cloner.fill(ctx, jobs...); err != nil {
		return err
	}
	for _, j := range jobs {
		if err := errors.Join(g.pool.makeImage(j.to), g.pool.store.save(j.to)); err != nil {
			return err
		}
	}
	failpoint.Hit("driver-image-made")
	r.Ready, r.Created = true, jobs[0].to.Created
	return g.store.save(r)
}

// complete returns the members of a group that exists, and makes their records ready, which
// the call that made the group may not have done before the driver was killed.
func (g *groups) complete(r *record) (members []*record, err error) {
	for _, id := range r.members() {
		m, err := g.pool.store.load(id)
		if err == nil && m == nil {
			err = status.Errorf(codes.DataLoss, "group snapshot %q: the record of its snapshot %q is gone", r.ID, id)
		}
		if err == nil && !m.Ready {
			m.Ready = true
			if err = g.pool.store.save(m); err != nil { // the group is there: a later call completes it
				err = status.Error(codes.Aborted, err.Error())
			}
		}
		if err != nil {
			return nil, err
		}
		members = append(members, m)
	}
	return members, nil
}

// erase removes a group and those of its members that exist.
func (g *groups) erase(r *record) error {
	if err := g.store.unready(r); err != nil {
		return err
	}
	failpoint.Hit("driver-group-erasing")
	for _, id := range r.members() {
		m, err := g.pool.store.load(id)
		if err == nil && m != nil {
			err = g.pool.erase(m)
		}
		if err != nil {
			return err
		}
	}
	failpoint.Hit("driver-group-emptied")
	return g.store.remove(r.ID)
}

// sweep completes or removes groups that were unfinished when the driver was killed.
func (g *groups) sweep() error {
	if err := g.store.clean(); err != nil {
		return err
	}
	all, err := g.store.list()
	if err != nil {
		g.pool.log.Error("some records of groups cannot be read; their snapshots are left alone", zap.Error(err))
	}
	for _, r := range all {
		if !r.Ready {
			err = g.erase(r)
		} else {
			_, err = g.complete(r)
		}
		if err != nil {
			g.pool.log.Error("a group snapshot is unfinished and left alone", zap.String("group", r.ID), zap.Error(err))
		}
	}
	return nil
}

// mostVolumes bounds a group, as each volume of it costs two processes while it is frozen.
const mostVolumes = 32

func (g *groups) GroupControllerGetCapabilities(context.Context, *csi.GroupControllerGetCapabilitiesRequest) (
	*csi.GroupControllerGetCapabilitiesResponse, error,
) {
	reply := &csi.GroupControllerGetCapabilitiesResponse{}
	if g.cloner.able() {
		reply.Capabilities = []*csi.GroupControllerServiceCapability{{
			Type: &csi.GroupControllerServiceCapability_Rpc{Rpc: &csi.GroupControllerServiceCapability_RPC{
				Type: csi.GroupControllerServiceCapability_RPC_CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT,
			}},
		}}
	}
	return reply, nil
}

// CreateVolumeGroupSnapshot makes snapshots of volumes, also of those in use: all or none.
func (g *groups) CreateVolumeGroupSnapshot(ctx context.Context, req *csi.CreateVolumeGroupSnapshotRequest) (
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
	r, err := g.store.existing(want.ID, g.erase)
	if err != nil {
		return nil, err
	}
	if r != nil && !slices.Equal(r.Volumes, want.Volumes) {
		return nil, status.Errorf(codes.AlreadyExists, "group snapshot %q exists and is of the volumes %q, not of %q", r.ID, r.Volumes, want.Volumes)
	}
	if r == nil {
		r = want
		if err := g.create(ctx, r); err != nil {
			return nil, err
		}
	}
	made, err := g.describe(r)
	return &csi.CreateVolumeGroupSnapshotResponse{GroupSnapshot: made}, err
}

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
	return &record{Version: recordVersion, ID: newID("group-", req.GetName()), Volumes: volumes}, nil
}

func (g *groups) describe(r *record) (*csi.VolumeGroupSnapshot, error) {
	members, err := g.complete(r)
	reply := &csi.VolumeGroupSnapshot{GroupSnapshotId: r.ID, CreationTime: timestamppb.New(r.Created), ReadyToUse: true}
	for _, m := range members {
		reply.Snapshots = append(reply.Snapshots, describeSnapshot(m))
	}
	return reply, err
}

// find locks and returns a group, or nil if there is none. Snapshots that the request names must be those of the group.
func (g *groups) find(ctx context.Context, req interface {
	GetGroupSnapshotId() string
	GetSnapshotIds() []string
}) (r *record, release func(), err error) {
	id := req.GetGroupSnapshotId()
	if id == "" {
		return nil, nil, status.Error(codes.InvalidArgument, "group_snapshot_id is missing")
	}
	named := req.GetSnapshotIds()
	return g.locks.record(ctx, id, func(id string) (*record, error) {
		r, err := g.store.load(id)
		if err != nil || r == nil || len(named) == 0 {
			return r, err
		}
		if members := slices.Sorted(slices.Values(r.members())); !slices.Equal(slices.Sorted(slices.Values(named)), members) {
			return nil, status.Errorf(codes.InvalidArgument, "snapshot_ids: group snapshot %q has %q, not %q", r.ID, members, named)
		}
		return r, nil
	})
}

func (g *groups) DeleteVolumeGroupSnapshot(ctx context.Context, req *csi.DeleteVolumeGroupSnapshotRequest) (
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
	return &csi.DeleteVolumeGroupSnapshotResponse{}, g.erase(r)
}

func (g *groups) GetVolumeGroupSnapshot(ctx context.Context, req *csi.GetVolumeGroupSnapshotRequest) (
	*csi.GetVolumeGroupSnapshotResponse, error,
) {
	r, release, err := g.find(ctx, req)
	if err != nil {
		return nil, err
	}
	defer release()
	if r == nil || !r.Ready {
		return nil, status.Errorf(codes.NotFound, "there is no group snapshot %q on node %s", req.GetGroupSnapshotId(), g.pool.config.NodeID)
	}
	found, err := g.describe(r)
	return &csi.GetVolumeGroupSnapshotResponse{GroupSnapshot: found}, err
}
