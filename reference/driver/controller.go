package driver

import (
	"cmp"
	"context"
	"encoding/base64"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
)

type controller struct {
	csi.UnimplementedControllerServer

	config Config
	locks  *locks
	pool   *pool
	cloner *cloner
}

func (c *controller) ControllerGetCapabilities(context.Context, *csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	reply := &csi.ControllerGetCapabilitiesResponse{}
	kinds := []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME,
		csi.ControllerServiceCapability_RPC_LIST_VOLUMES,
		csi.ControllerServiceCapability_RPC_GET_CAPACITY,
		csi.ControllerServiceCapability_RPC_EXPAND_VOLUME,
		csi.ControllerServiceCapability_RPC_MODIFY_VOLUME,
		csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
	}
	if c.cloner.able() {
		kinds = append(kinds, csi.ControllerServiceCapability_RPC_CLONE_VOLUME, csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT,
			csi.ControllerServiceCapability_RPC_LIST_SNAPSHOTS, csi.ControllerServiceCapability_RPC_GET_SNAPSHOT)
	}
	for _, kind := range kinds {
		reply.Capabilities = append(reply.Capabilities, &csi.ControllerServiceCapability{
			Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: kind}},
		})
	}
	return reply, nil
}

const (
	maxName       = 128
	maxID         = 192
	kubernetesKey = "csi.storage.k8s.io/"
)

// volumeID derives the id from the name, so that the same request finds the same volume.
func volumeID(name string) string { return "vol-" + fileName(name)[:32] }

func (c *controller) CreateVolume(ctx context.Context, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	want, err := c.readCreate(req)
	if err != nil {
		return nil, err
	}
	release, err := c.locks.take(ctx, want.ID, want.Source.id())
	if err != nil {
		return nil, err
	}
	defer release()
	r, err := c.pool.existing(want.ID)
	if err != nil {
		return nil, err
	}
	if r != nil {
		asked := req.GetCapacityRange()
		switch {
		case r.Source != want.Source:
			return nil, status.Errorf(codes.AlreadyExists, "volume %q exists and was made from %v, not from %v", r.ID, r.Source, want.Source)
		case r.Capacity < asked.GetRequiredBytes() || asked.GetLimitBytes() > 0 && r.Capacity > asked.GetLimitBytes():
			return nil, status.Errorf(codes.AlreadyExists, "volume %q exists with %d bytes, which is not in the range asked for", r.ID, r.Capacity)
		}
		return &csi.CreateVolumeResponse{Volume: c.config.describe(r)}, nil
	}
	if want.Source.id() == "" {
		err = c.pool.provisionBlank(want)
	} else {
		err = c.clone(ctx, want, req)
	}
	if err != nil {
		return nil, err
	}
	return &csi.CreateVolumeResponse{Volume: c.config.describe(want)}, nil
}

func (c *controller) clone(ctx context.Context, want *record, req *csi.CreateVolumeRequest) error {
	from, err := c.cloner.find(want.Source)
	if err != nil {
		return err
	}
	if want.Capacity, err = sizeOfClone(from.Capacity, req.GetCapacityRange()); err != nil {
		return err
	}
	if err := c.cloner.checkContent(from, req.GetVolumeCapabilities()); err != nil {
		return err
	}
	return c.cloner.provision(ctx, from, want)
}

func (c *controller) readCreate(req *csi.CreateVolumeRequest) (*record, error) {
	buffered, err := readMutable(req.GetMutableParameters(), false)
	if err := cmp.Or(checkName(req.GetName()), err, readAccesses(req.GetVolumeCapabilities()), checkParameters(req.GetParameters()),
		c.config.checkTopology(req.GetAccessibilityRequirements())); err != nil {
		return nil, err
	}
	content := req.GetVolumeContentSource()
	from := source{Volume: content.GetVolume().GetVolumeId(), Snapshot: content.GetSnapshot().GetSnapshotId()}
	if content != nil && from.id() == "" {
		return nil, status.Error(codes.InvalidArgument, "volume_content_source names neither a volume nor a snapshot")
	}
	size, err := readRange(req.GetCapacityRange())
	return &record{
		Version: recordVersion, ID: volumeID(req.GetName()), Capacity: size, Created: time.Now().UTC(), Source: from, Buffered: buffered,
	}, err
}

func checkName(name string) error {
	switch {
	case name == "":
		return status.Error(codes.InvalidArgument, "name is missing")
	case len(name) > maxName:
		return status.Errorf(codes.InvalidArgument, "name has %d bytes, at most are %d", len(name), maxName)
	}
	return nil
}

func checkParameters(parameters map[string]string) error {
	for key := range parameters {
		if !strings.HasPrefix(key, kubernetesKey) {
			return status.Errorf(codes.InvalidArgument, "parameter %q is not known; this driver has none", key)
		}
	}
	return nil
}

func (c *controller) DeleteVolume(ctx context.Context, req *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	id := req.GetVolumeId()
	if id == "" {
		return nil, status.Error(codes.InvalidArgument, "volume_id is missing")
	}
	r, release, err := c.locks.record(ctx, id, c.pool.volume)
	if err != nil {
		return nil, err
	}
	defer release()
	if r == nil {
		return &csi.DeleteVolumeResponse{}, nil
	}
	devices, _, err := c.pool.settled(id)
	if err != nil {
		return nil, err
	}
	if len(devices) > 0 {
		return nil, status.Errorf(codes.FailedPrecondition, "volume %q is attached as %s on node %s: unstage it first",
			id, devices[0].Path, c.config.NodeID)
	}
	return &csi.DeleteVolumeResponse{}, c.pool.erase(r)
}

func (c *controller) ValidateVolumeCapabilities(_ context.Context, req *csi.ValidateVolumeCapabilitiesRequest) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	if len(req.GetVolumeCapabilities()) == 0 {
		return nil, status.Error(codes.InvalidArgument, "volume_capabilities are missing")
	}
	if _, err := c.pool.find(req.GetVolumeId()); err != nil {
		return nil, err
	}
	if err := readAccesses(req.GetVolumeCapabilities()); err != nil {
		return &csi.ValidateVolumeCapabilitiesResponse{Message: status.Convert(err).Message()}, nil
	}
	return &csi.ValidateVolumeCapabilitiesResponse{Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{
		VolumeContext: req.GetVolumeContext(), VolumeCapabilities: req.GetVolumeCapabilities(),
		Parameters: req.GetParameters(), MutableParameters: req.GetMutableParameters(),
	}}, nil
}

// ControllerExpandVolume grows the image. NodeExpandVolume then grows the loop device and the filesystem.
func (c *controller) ControllerExpandVolume(ctx context.Context, req *csi.ControllerExpandVolumeRequest) (*csi.ControllerExpandVolumeResponse, error) {
	id := req.GetVolumeId()
	if req.GetCapacityRange() == nil {
		return nil, status.Errorf(codes.InvalidArgument, "volume %q: capacity_range is missing", id)
	}
	r, release, err := c.locks.record(ctx, id, c.pool.find)
	if err != nil {
		return nil, err
	}
	defer release()
	size, err := readRange(req.GetCapacityRange())
	if err != nil {
		return nil, err
	}
	if limit := req.GetCapacityRange().GetLimitBytes(); limit > 0 && r.Capacity > limit {
		return nil, status.Errorf(codes.OutOfRange, "volume %q has %d bytes already, more than the limit of %d", id, r.Capacity, limit)
	}
	before := r.Capacity
	if more := size - before; more > 0 && req.GetCapacityRange().GetRequiredBytes() > before {
		r.Capacity = size
		if err := c.pool.reserve(r, more, more); err != nil {
			return nil, err
		}
	}
	failpoint.Hit("driver-expand-recorded")
	// Also if the driver was killed between the record and this.
	if err := c.pool.makeImage(r); err != nil {
		return nil, c.notGrown(r, before, err)
	}
	return &csi.ControllerExpandVolumeResponse{CapacityBytes: r.Capacity, NodeExpansionRequired: true}, nil
}

// notGrown sets the recorded capacity back after an error, unless the image has grown all the same.
func (c *controller) notGrown(r *record, before int64, err error) error {
	if info, statErr := os.Stat(c.pool.image(r.ID)); statErr == nil && info.Size() >= r.Capacity {
		return notUndone(err)
	}
	r.Capacity = before // else no stage would succeed any more
	return afterUndo(err, c.pool.store.save(r))
}

// ControllerModifyVolume changes the attributes of a volume: of its loop devices, and on record for the next attach.
func (c *controller) ControllerModifyVolume(ctx context.Context, req *csi.ControllerModifyVolumeRequest) (*csi.ControllerModifyVolumeResponse, error) {
	r, release, err := c.locks.record(ctx, req.GetVolumeId(), c.pool.find)
	if err != nil {
		return nil, err
	}
	defer release()
	if r.Buffered, err = readMutable(req.GetMutableParameters(), r.Buffered); err != nil {
		return nil, err
	}
	// First, because it may be impossible, and then nothing may have changed.
	if err := c.pool.setDirectIO(r); err != nil {
		return nil, err
	}
	failpoint.Hit("driver-modified")
	return &csi.ControllerModifyVolumeResponse{}, c.pool.store.save(r)
}

func (c *controller) GetCapacity(_ context.Context, req *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	none := &csi.GetCapacityResponse{MaximumVolumeSize: wrapperspb.Int64(0)}
	if len(req.GetVolumeCapabilities()) > 0 && readAccesses(req.GetVolumeCapabilities()) != nil {
		return none, nil
	}
	if at, ok := req.GetAccessibleTopology().GetSegments()[c.config.topologyKey()]; ok && at != c.config.NodeID {
		return none, nil
	}
	free, err := c.pool.available()
	if err != nil {
		return nil, err
	}
	return &csi.GetCapacityResponse{
		AvailableCapacity: free, MaximumVolumeSize: wrapperspb.Int64(min(free, mostSize)), MinimumVolumeSize: wrapperspb.Int64(leastSize),
	}, nil
}

// tokenPrefix is before the last id of a page in a token, which stays valid whatever is created and deleted meanwhile.
const tokenPrefix = "after:"

// ListVolumes lists volumes by id, without ephemeral ones, which belong to their pods.
func (c *controller) ListVolumes(_ context.Context, req *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	page, next, err := c.page(req, func(r *record) bool { return r.Snapshot == nil && !r.Ephemeral })
	if err != nil {
		return nil, err
	}
	reply := &csi.ListVolumesResponse{NextToken: next}
	for _, r := range page {
		reply.Entries = append(reply.Entries, &csi.ListVolumesResponse_Entry{Volume: c.config.describe(r)})
	}
	return reply, nil
}

// ListSnapshots lists snapshots by id: all, or those of a volume, or one.
func (c *controller) ListSnapshots(_ context.Context, req *csi.ListSnapshotsRequest) (*csi.ListSnapshotsResponse, error) {
	id, volume := req.GetSnapshotId(), req.GetSourceVolumeId()
	page, next, err := c.page(req, func(r *record) bool {
		return r.Snapshot != nil && (id == "" || r.ID == id) && (volume == "" || r.Source.Volume == volume)
	})
	if err != nil {
		return nil, err
	}
	reply := &csi.ListSnapshotsResponse{NextToken: next}
	for _, r := range page {
		reply.Entries = append(reply.Entries, &csi.ListSnapshotsResponse_Entry{Snapshot: describeSnapshot(r)})
	}
	return reply, nil
}

// page returns the wanted records of one page, and the token of the next page.
func (c *controller) page(req interface {
	GetMaxEntries() int32
	GetStartingToken() string
}, wanted func(*record) bool,
) (page []*record, next string, err error) {
	if req.GetMaxEntries() < 0 {
		return nil, "", status.Error(codes.InvalidArgument, "max_entries is negative")
	}
	raw, err := base64.RawURLEncoding.DecodeString(req.GetStartingToken())
	after, ours := strings.CutPrefix(string(raw), tokenPrefix)
	if req.GetStartingToken() != "" && (err != nil || !ours) {
		return nil, "", status.Error(codes.Aborted, "starting_token is none of this driver's: list from the start")
	}
	all, err := c.pool.store.list()
	if err != nil {
		c.config.Log.Error("volumes and snapshots whose records cannot be read are not listed", zap.Error(err))
	}
	all = slices.DeleteFunc(all, func(r *record) bool { return !r.Ready || r.ID <= after || !wanted(r) })
	if most := int(req.GetMaxEntries()); most > 0 && most < len(all) {
		all = all[:most]
		next = base64.RawURLEncoding.EncodeToString([]byte(tokenPrefix + all[most-1].ID))
	}
	return all, next, nil
}

// directIOKey is the only attribute of a VolumeAttributesClass. With "true", the default, loop devices bypass the
// node's page cache if the data directory allows that; with "false" they use it.
const directIOKey = "directIO"

// readMutable returns whether loop devices are to use the page cache: as the parameters say, else as before.
func readMutable(parameters map[string]string, buffered bool) (bool, error) {
	for key, value := range parameters {
		if key != directIOKey {
			return false, status.Errorf(codes.InvalidArgument, "mutable_parameters: %q is not known; there is %s", key, directIOKey)
		}
		direct, err := strconv.ParseBool(value)
		if err != nil {
			return false, status.Errorf(codes.InvalidArgument, "mutable_parameters: %s is %q, and must be true or false", key, value)
		}
		buffered = !direct
	}
	return buffered, nil
}
