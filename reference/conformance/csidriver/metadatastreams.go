package csidriver

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

// blockRange is a tuple of a stream.
type blockRange struct{ from, to int64 }

// contains reports whether ranges, together, contain another one.
func contains(all []blockRange, from, to int64) bool {
	for _, one := range all {
		if one.from <= from && one.to > from {
			from = min(one.to, to)
		}
	}
	return from == to
}

// question is a call: for the changed blocks, or without a base for the allocated ones.
type question struct {
	base, target string
	delta        bool
	from         int64
	most         int32
	// stopAfter ends the call after so many messages, as a client that dies; 0: it does not.
	stopAfter int
}

type message interface {
	GetBlockMetadataType() csi.BlockMetadataType
	GetVolumeCapacityBytes() int64
	GetBlockMetadata() []*csi.BlockMetadata
}

// ask reads a stream. Its messages come unchecked.
func (d *driver) ask(ctx context.Context, q question) (all []message, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	receive, err := d.open(ctx, q)
	for err == nil && (q.stopAfter == 0 || len(all) < q.stopAfter) {
		var one message
		if one, err = receive(); err == nil {
			all = append(all, one)
		}
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return all, err
}

func (d *driver) open(ctx context.Context, q question) (receive func() (message, error), err error) {
	if q.delta {
		stream, err := d.metadata.GetMetadataDelta(ctx, &csi.GetMetadataDeltaRequest{
			BaseSnapshotId: q.base, TargetSnapshotId: q.target, StartingOffset: q.from, MaxResults: q.most,
		})
		return func() (message, error) { return stream.Recv() }, err
	}
	stream, err := d.metadata.GetMetadataAllocated(ctx, &csi.GetMetadataAllocatedRequest{
		SnapshotId: q.target, StartingOffset: q.from, MaxResults: q.most,
	})
	return func() (message, error) { return stream.Recv() }, err
}

func rangesOf(all []message) (ranges []blockRange) {
	for _, one := range all {
		for _, tuple := range one.GetBlockMetadata() {
			ranges = append(ranges, blockRange{tuple.GetByteOffset(), tuple.GetByteOffset() + tuple.GetSizeBytes()})
		}
	}
	return ranges
}

// checkOrder: tuples are not empty, ascend, and do not overlap, also over messages.
func checkOrder(all []message, _ int64) error {
	last := int64(0)
	for _, one := range rangesOf(all) {
		if one.from < last || one.to <= one.from {
			return fmt.Errorf("bytes %d to %d come after byte %d", one.from, one.to, last)
		}
		last = one.to
	}
	return nil
}

// checkType: all messages have one type. With fixed length, all tuples have one size.
func checkType(all []message, _ int64) error {
	for _, one := range all {
		kind := one.GetBlockMetadataType()
		if kind != all[0].GetBlockMetadataType() || kind == csi.BlockMetadataType_UNKNOWN {
			return fmt.Errorf("a message of type %v in a stream of %v", kind, all[0].GetBlockMetadataType())
		}
	}
	ranges := rangesOf(all)
	for _, one := range ranges {
		if all[0].GetBlockMetadataType() == csi.BlockMetadataType_FIXED_LENGTH && one.to-one.from != ranges[0].to-ranges[0].from {
			return fmt.Errorf("tuples of %d and of %d bytes, with fixed length", ranges[0].to-ranges[0].from, one.to-one.from)
		}
	}
	return nil
}

// checkCapacity: all messages have one capacity, and all tuples lie in it.
func checkCapacity(all []message, want int64) error {
	for _, one := range all {
		if got := one.GetVolumeCapacityBytes(); got != want {
			return fmt.Errorf("a message with a capacity of %d, and the volume has %d bytes", got, want)
		}
	}
	for _, one := range rangesOf(all) {
		if one.from < 0 || one.to > want {
			return fmt.Errorf("bytes %d to %d of %d", one.from, one.to, want)
		}
	}
	return nil
}
