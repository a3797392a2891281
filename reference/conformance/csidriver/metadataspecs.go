package csidriver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/reference/conformance"
)

// RunMetadata runs the suite of the SnapshotMetadata service.
func RunMetadata(ctx context.Context, conn grpc.ClientConnInterface, opts Options, onResult func(conformance.Result)) (conformance.Report, error) {
	return run(ctx, conn, opts, metadataSpecs(), newFixture, onResult)
}

// fixture is two snapshots of a volume, one of it when it has grown, and one of another.
type fixture struct {
	d                            *driver
	capacity, grownCapacity      int64
	first, later, grown, foreign string
	was, is, isGrown             content
	notGrown                     error // why there is no grown snapshot
}

func newFixture(ctx context.Context, d *driver) (*fixture, error) {
	f := &fixture{d: d}
	v, err := d.volume(ctx, "v", blockAccess)
	if err != nil {
		return nil, err
	}
	other, err := d.volume(ctx, "other", blockAccess)
	if err != nil {
		return nil, err
	}
	f.capacity = v.capacity
	n := f.capacity / block
	f.was = content{0: 1, n / 8: 2, n/8 + 1: 3, n / 2: 4, n - 1: 5}
	f.is = content{0: 1, n / 8: 7, n/8 + 1: 3, n / 4: 8, n * 5 / 8: 9, n - 1: 5}
	if err := v.write(ctx, f.was); err != nil {
		return nil, err
	}
	if f.first, err = v.snapshot(ctx, "first"); err != nil {
		return nil, err
	}
	if err := v.write(ctx, f.is.changes(f.was)); err != nil { // zeros over a block with data, too
		return nil, err
	}
	if f.later, err = v.snapshot(ctx, "later"); err != nil {
		return nil, err
	}
	if f.foreign, err = other.snapshot(ctx, "foreign"); err != nil {
		return nil, err
	}
	f.notGrown = f.grow(ctx, v)
	return f, nil
}

// grow makes the third snapshot, where volumes can grow.
func (f *fixture) grow(ctx context.Context, v *volume) error {
	if !f.d.able[csi.ControllerServiceCapability_RPC_EXPAND_VOLUME] {
		return errNotReported
	}
	reply, err := f.d.controller.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{
		VolumeId: v.id, CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * v.capacity}, VolumeCapability: v.access,
	})
	if err != nil {
		return fmt.Errorf("ControllerExpandVolume: %w", err)
	}
	f.grownCapacity = reply.GetCapacityBytes()
	added := content{f.grownCapacity/block - 1: 6}
	if err := v.write(ctx, added); err != nil {
		return err
	}
	f.isGrown = maps.Clone(f.is)
	maps.Copy(f.isGrown, added)
	f.grown, err = v.snapshot(ctx, "grown")
	return err
}

func metadataSpecs() []spec[*fixture] {
	return []spec[*fixture]{
		{"advertised", "the plugin reports SNAPSHOT_METADATA_SERVICE", func(_ context.Context, f *fixture) error {
			if !f.d.advertised {
				return errors.New("it does not")
			}
			return nil
		}},
		{"allocated", "all blocks with data are named", func(ctx context.Context, f *fixture) error {
			_, err := f.covered(ctx, question{target: f.later}, f.is)
			return err
		}},
		{"delta", "all blocks that changed are named, also those that became zero", func(ctx context.Context, f *fixture) error {
			_, err := f.covered(ctx, question{delta: true, base: f.first, target: f.later}, f.is.changes(f.was))
			return err
		}},
		{"order", "tuples ascend, do not overlap and are not empty", each(checkOrder)},
		{"type", "all messages of a stream have one type, and with fixed length one size", each(checkType)},
		{"capacity", "all messages of a stream have the volume's capacity, which no tuple exceeds", each(checkCapacity)},
		{"max-results", "no message has more tuples than are asked for, and none is lost", tryMaxResults},
		{"offset", "tuples end after starting_offset, and none after it is lost", tryOffset},
		{"resume", "a stream that was cut off goes on at the end of what came", tryResume},
		{"offset-beyond", "a starting_offset that is negative or beyond the capacity is OUT_OF_RANGE", tryBeyond},
		{"unknown", "an unknown snapshot is NOT_FOUND", func(ctx context.Context, f *fixture) error {
			unknown := f.d.run + "-unknown"
			return f.wantCode(ctx, codes.NotFound, question{target: unknown},
				question{delta: true, base: unknown, target: f.later}, question{delta: true, base: f.first, target: unknown})
		}},
		{"missing", "a request without a snapshot is INVALID_ARGUMENT", func(ctx context.Context, f *fixture) error {
			return f.wantCode(ctx, codes.InvalidArgument, question{}, question{delta: true, target: f.later}, question{delta: true, base: f.first})
		}},
		{"other-volume", "a base of another volume is INVALID_ARGUMENT", func(ctx context.Context, f *fixture) error {
			return f.wantCode(ctx, codes.InvalidArgument, question{delta: true, base: f.foreign, target: f.later})
		}},
		{"newer-base", "a base that is newer than the target is INVALID_ARGUMENT", func(ctx context.Context, f *fixture) error {
			return f.wantCode(ctx, codes.InvalidArgument, question{delta: true, base: f.later, target: f.first})
		}},
		{"grown", "of a volume that grew, what was written beyond the base's end is named, and the capacity is the new one", tryGrown},
	}
}

// both are the two calls about the later snapshot, with what each has to name.
func (f *fixture) both() map[question]content {
	return map[question]content{
		{target: f.later}: f.is,
		{delta: true, base: f.first, target: f.later}: f.is.changes(f.was),
	}
}

// each checks the answers of both calls, in large and in small messages.
func each(check func(all []message, capacity int64) error) func(context.Context, *fixture) error {
	return func(ctx context.Context, f *fixture) error {
		for q := range f.both() {
			for _, q.most = range []int32{0, 1} {
				all, err := f.d.ask(ctx, q)
				if err = cmp.Or(err, check(all, f.capacity)); err != nil {
					return fmt.Errorf("%s: %w", q, err)
				}
			}
		}
		return nil
	}
}

func (q question) String() string {
	name := "GetMetadataAllocated"
	if q.delta {
		name = "GetMetadataDelta"
	}
	return fmt.Sprintf("%s with starting_offset %d and max_results %d", name, q.from, q.most)
}

// covered asks, and fails unless the answer names all that is wanted.
func (f *fixture) covered(ctx context.Context, q question, want content) ([]message, error) {
	all, err := f.d.ask(ctx, q)
	if err == nil {
		err = want.covered(rangesOf(all), q.from)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", q, err)
	}
	return all, nil
}

func (f *fixture) wantCode(ctx context.Context, want codes.Code, all ...question) error {
	for _, q := range all {
		if _, err := f.d.ask(ctx, q); status.Code(err) != want {
			return fmt.Errorf("%s: %v instead of %v", q, status.Code(err), want)
		}
	}
	return nil
}

func tryMaxResults(ctx context.Context, f *fixture) error {
	for q, want := range f.both() {
		for _, q.most = range []int32{1, 2} {
			all, err := f.covered(ctx, q, want)
			if err != nil {
				return err
			}
			for _, one := range all {
				if n := len(one.GetBlockMetadata()); n > int(q.most) {
					return fmt.Errorf("%s: a message with %d tuples", q, n)
				}
			}
		}
	}
	return nil
}

func tryOffset(ctx context.Context, f *fixture) error {
	for q, want := range f.both() {
		for _, q.from = range []int64{1, f.capacity/8 + block, f.capacity / 2, f.capacity - block} {
			all, err := f.covered(ctx, q, want)
			if err != nil {
				return err
			}
			for _, one := range rangesOf(all) {
				if one.to <= q.from {
					return fmt.Errorf("%s: bytes %d to %d are named", q, one.from, one.to)
				}
			}
		}
	}
	return nil
}

func tryResume(ctx context.Context, f *fixture) error {
	for q, want := range f.both() {
		q.most, q.stopAfter = 1, 1
		all, err := f.d.ask(ctx, q)
		if err != nil {
			return err
		}
		got := rangesOf(all)
		if len(got) > 0 {
			q.from = got[len(got)-1].to
		}
		q.stopAfter = 0
		rest, err := f.d.ask(ctx, q)
		if err == nil {
			err = want.covered(append(got, rangesOf(rest)...), 0)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", q, err)
		}
	}
	return nil
}

func tryBeyond(ctx context.Context, f *fixture) error {
	for q := range f.both() {
		for _, q.from = range []int64{-1, f.capacity + 1} {
			if err := f.wantCode(ctx, codes.OutOfRange, q); err != nil {
				return err
			}
		}
	}
	return nil
}

func tryGrown(ctx context.Context, f *fixture) error {
	if f.notGrown != nil {
		return f.notGrown
	}
	for q, want := range map[question]content{
		{target: f.grown}: f.isGrown, {delta: true, base: f.later, target: f.grown}: f.isGrown.changes(f.is),
	} {
		all, err := f.covered(ctx, q, want)
		if err = cmp.Or(err, checkCapacity(all, f.grownCapacity)); err != nil {
			return err
		}
	}
	return nil
}
