package driver

import (
	"cmp"
	"context"
	"os"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// snapshotMetadata serves CSI's SnapshotMetadata: which blocks of a snapshot have data, and
// which have changed since an earlier one. The access type of the volume does not matter.
type snapshotMetadata struct {
	csi.UnimplementedSnapshotMetadataServer

	config Config
	locks  *locks
	pool   *pool
	// reflinks: snapshots share extents, so that less has to be compared.
	reflinks bool
	metrics  *metrics
	// slots bounds the streams: each has one until it ends, also if its client does not read.
	slots chan struct{}
	// free has the buffers for comparing data, which all streams share.
	free chan *buffers
	// stopping is closed when the driver stops. Streams end then: callers can resume them.
	stopping chan struct{}
}

// mostStreams bounds the memory and the open images of all streams.
const mostStreams = 64

// opened is a snapshot whose image can be read even if the snapshot is deleted meanwhile.
type opened struct {
	record *record
	image  *os.File
}

func (m *snapshotMetadata) GetMetadataAllocated(req *csi.GetMetadataAllocatedRequest, stream csi.SnapshotMetadata_GetMetadataAllocatedServer) error {
	of, err := m.open(stream.Context(), "snapshot_id", req.GetSnapshotId())
	if err != nil {
		return err
	}
	defer func() { _ = of.image.Close() }() // nothing was written
	return m.stream(stream.Context(), of, req, func(blocks []*csi.BlockMetadata) error {
		return stream.Send(&csi.GetMetadataAllocatedResponse{
			BlockMetadataType: csi.BlockMetadataType_VARIABLE_LENGTH, VolumeCapacityBytes: of.record.Capacity, BlockMetadata: blocks,
		})
	}, func(w walk) error {
		return w.allocated(&regions{file: of.image, size: of.record.Capacity})
	})
}

// GetMetadataDelta streams the ranges in which a snapshot differs from an earlier one of its
// volume. It may include blocks that did not change, and never omits one that did.
func (m *snapshotMetadata) GetMetadataDelta(req *csi.GetMetadataDeltaRequest, stream csi.SnapshotMetadata_GetMetadataDeltaServer) error {
	base, err := m.open(stream.Context(), "base_snapshot_id", req.GetBaseSnapshotId())
	if err != nil {
		return err
	}
	defer func() { _ = base.image.Close() }() // nothing was written
	target, err := m.open(stream.Context(), "target_snapshot_id", req.GetTargetSnapshotId())
	if err != nil {
		return err
	}
	defer func() { _ = target.image.Close() }() // the same
	// Only the driver can check that: backup software names the base by its CSI id, whoever it belongs to.
	was, is := base.record, target.record
	switch {
	case was.Source != is.Source:
		return status.Errorf(codes.InvalidArgument, "base_snapshot_id: %q is a snapshot of another volume than %q", was.ID, is.ID)
	case was.Snapshot.Number >= is.Snapshot.Number || was.Capacity > is.Capacity:
		return status.Errorf(codes.InvalidArgument, "base_snapshot_id: %q is not older than %q", was.ID, is.ID)
	}
	return m.stream(stream.Context(), target, req, func(blocks []*csi.BlockMetadata) error {
		return stream.Send(&csi.GetMetadataDeltaResponse{
			BlockMetadataType: csi.BlockMetadataType_VARIABLE_LENGTH, VolumeCapacityBytes: target.record.Capacity, BlockMetadata: blocks,
		})
	}, func(w walk) error { return m.delta(stream.Context(), base, target, w) })
}

// delta reports what has changed. Everything beyond the end of the base has changed.
func (m *snapshotMetadata) delta(ctx context.Context, base, target opened, w walk) error {
	common := w
	common.to = min(w.to, base.record.Capacity)
	before, after := layoutOf(base.image, base.record.Capacity, m.reflinks), layoutOf(target.image, target.record.Capacity, m.reflinks)
	compare := &comparison{base: base.image, target: target.image, free: m.free}
	if err := compare.run(ctx, common, before, after); err != nil {
		return err
	}
	if grown := max(w.from, common.to); grown < w.to {
		return w.report(grown, w.to)
	}
	return nil
}

func (m *snapshotMetadata) stream(ctx context.Context, of opened, req interface {
	GetStartingOffset() int64
	GetMaxResults() int32
}, send func([]*csi.BlockMetadata) error, run func(walk) error,
) error {
	select {
	case m.slots <- struct{}{}:
		defer func() { <-m.slots }()
	default:
		return status.Errorf(codes.ResourceExhausted, "%d streams are under way: try again when one has ended", cap(m.slots))
	}
	from, most := req.GetStartingOffset(), int(req.GetMaxResults())
	switch {
	case most < 0:
		return status.Error(codes.InvalidArgument, "max_results is negative")
	case from < 0 || from > of.record.Capacity:
		return status.Errorf(codes.OutOfRange, "starting_offset: %d is not in the %d bytes of snapshot %q", from, of.record.Capacity, of.record.ID)
	}
	blocks := &reporter{most: min(cmp.Or(most, blocksAtOnce), blocksAtOnce), send: send, flushed: time.Now()}
	defer func() { m.metrics.named(ctx, blocks.bytes) }()
	err := run(walk{from: from, to: of.record.Capacity, alive: func() error { return blocks.pass(m.alive(ctx)) }, report: blocks.report, unchanged: blocks.unchanged})
	if err != nil {
		return err
	}
	m.config.Log.Debug("reported blocks", zap.String("snapshot", of.record.ID), zap.Int64("from", from),
		zap.Int64("ranges", blocks.ranges), zap.Int64("bytes", blocks.bytes))
	return blocks.end()
}

func (m *snapshotMetadata) alive(ctx context.Context) error {
	if ctx.Err() != nil {
		return status.FromContextError(ctx.Err()).Err()
	}
	select {
	case <-m.stopping:
		return status.Error(codes.Unavailable, "the driver stops: resume by starting_offset when it serves again")
	default:
		return nil
	}
}

// open opens the snapshot that a field of a request names.
func (m *snapshotMetadata) open(ctx context.Context, field, id string) (opened, error) {
	if id == "" {
		return opened{}, status.Errorf(codes.InvalidArgument, "%s is missing", field)
	}
	r, release, err := m.locks.record(ctx, id, m.pool.store.load)
	if err != nil {
		return opened{}, err
	}
	defer release()
	if r == nil || !r.Ready || r.Snapshot == nil {
		return opened{}, status.Errorf(codes.NotFound, "there is no snapshot %q on node %s", id, m.config.NodeID)
	}
	image, err := m.pool.openImage(r, os.O_RDONLY)
	return opened{record: r, image: image}, err
}

// walk iterates once over a range of an image.
type walk struct {
	from, to int64
	// alive returns an error if the walk is to stop early.
	alive func() error
	// report is called with ranges that ascend; the next may begin where the last ended.
	report func(from, to int64) error
	// unchanged is called between them with ranges that were compared and have no change.
	unchanged func(from, to int64) error
}

func (w walk) allocated(image layout) error {
	for at := w.from; at < w.to; {
		if err := w.alive(); err != nil {
			return err
		}
		p, err := image.piece(at)
		if err != nil {
			return err
		}
		end := min(p.end, w.to)
		if p.content != zeros {
			if err := w.report(at, end); err != nil {
				return err
			}
		}
		at = end
	}
	return nil
}

// changed reports the ranges in which an image differs from its base. It calls compare where the layouts do not say it.
func (w walk) changed(base, target layout, compare func(part walk, before, after piece) error) error {
	for at := w.from; at < w.to; {
		if err := w.alive(); err != nil {
			return err
		}
		before, err := base.piece(at)
		if err != nil {
			return err
		}
		after, err := target.piece(at)
		if err != nil {
			return err
		}
		part := w
		part.from, part.to = at, min(before.end, after.end, w.to)
		switch {
		case before.content == after.content && (before.content == zeros || before.content == shared && before.place == after.place):
		case before.content == unknown || after.content == unknown:
			err = compare(part, before, after)
		default:
			err = w.report(part.from, part.to)
		}
		if err != nil {
			return err
		}
		at = part.to
	}
	return nil
}

// blocksAtOnce is the most ranges of a message: it bounds the memory, and what a client loses that has to resume.
const blocksAtOnce = 1024

// reporter merges ranges and sends them in messages.
type reporter struct {
	most  int // in a message
	send  func([]*csi.BlockMetadata) error
	batch []*csi.BlockMetadata
	// What was reported, for the log and the metrics.
	sent          bool
	ranges, bytes int64
	flushed       time.Time
}

// flushEvery bounds what a client has to ask for again whose stream is cut by a proxy, as the sidecar does after some
// minutes. If comparing that takes longer, it would never get on.
const flushEvery = 5 * time.Second

// pass sends what has waited for long, or all if the stream has to stop.
func (r *reporter) pass(stop error) error {
	if len(r.batch) == 0 || stop == nil && time.Since(r.flushed) < flushEvery {
		return stop
	}
	return cmp.Or(stop, r.flush())
}

// report adds a range, which begins where the last one ended or later.
func (r *reporter) report(from, to int64) error {
	r.bytes += to - from
	if n := len(r.batch); n > 0 {
		if last := r.batch[n-1]; last.ByteOffset+last.SizeBytes == from {
			last.SizeBytes += to - from
			return nil
		}
		// A full message is sent only now: until here its last range could still grow.
		if n == r.most {
			if err := r.flush(); err != nil {
				return err
			}
		}
	}
	r.ranges++
	r.batch = append(r.batch, &csi.BlockMetadata{ByteOffset: from, SizeBytes: to - from})
	return nil
}

// unchanged reports the last block of a range without changes if nothing was sent for long, so that a client gets on.
func (r *reporter) unchanged(from, to int64) error {
	if len(r.batch) > 0 || time.Since(r.flushed) < flushEvery {
		return nil
	}
	return r.report(max(from, to-sizeGrain), to)
}

func (r *reporter) flush() error {
	batch := r.batch
	r.batch, r.sent, r.flushed = nil, true, time.Now()
	return r.send(batch)
}

// end sends what is left. If nothing was sent, it sends an empty message, which has the capacity.
func (r *reporter) end() error {
	if r.sent && len(r.batch) == 0 {
		return nil
	}
	return r.flush()
}
