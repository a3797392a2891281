package driver

import (
	"context"
	"encoding/base64"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// GetCapacity returns how many bytes can still be reserved.
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

// tokenPrefix is before the id in a token, which is the last id of a page. So a token stays
// valid whatever is created and deleted meanwhile.
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
	after, err := readToken(req.GetStartingToken())
	if err != nil {
		return nil, "", err
	}
	all, err := c.pool.store.list()
	if err != nil {
		c.log.Error("volumes and snapshots whose records cannot be read are not listed", zap.Error(err))
	}
	all = slices.DeleteFunc(all, func(r *record) bool { return !r.Ready || r.ID <= after || !wanted(r) })
	if most := int(req.GetMaxEntries()); most > 0 && most < len(all) {
		all = all[:most]
		next = base64.RawURLEncoding.EncodeToString([]byte(tokenPrefix + all[most-1].ID))
	}
	return all, next, nil
}

func readToken(token string) (after string, err error) {
	if token == "" {
		return "", nil
	}
	raw, err := base64.RawURLEncoding.DecodeString(token)
	after, ok := strings.CutPrefix(string(raw), tokenPrefix)
	if err != nil || !ok {
		return "", status.Error(codes.Aborted, "starting_token is none of this driver's: list from the start")
	}
	return after, nil
}
