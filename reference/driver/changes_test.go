package driver

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"runtime"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// span is a range, from and to.
type span [2]int64

// collect gives a walk that puts down what is reported.
func collect(from, to int64, into *[]span) walk {
	return walk{from: from, to: to, alive: func() error { return nil }, report: func(from, to int64) error {
		*into = append(*into, span{from, to})
		return nil
	}, unchanged: func(int64, int64) error { return nil }}
}

// fakeExtents is the layout of a file of so many bytes; the kernel lists so many at once.
func fakeExtents(size int64, atOnce int, all ...extent) *extents {
	return &extents{size: size, fetch: func(from, to int64) (found []extent, last bool, err error) {
		for _, one := range all {
			if one.end() <= from || int64(one.Logical) >= to {
				continue
			}
			if len(found) == atOnce {
				return found, false, nil
			}
			found = append(found, one)
		}
		return found, true, nil
	}}
}

func TestWhatExtentsProve(t *testing.T) {
	for flags, want := range map[uint32]content{
		0: private, extentLast: private, extentShared: shared, extentShared | extentLast: shared,
		extentUnwritten: zeros, extentUnwritten | extentShared: zeros, extentUnwritten | extentDelayed: unknown,
		extentShared | extentEncoded: unknown, extentShared | extentInline: unknown, extentShared | extentTail: unknown,
		extentNotKnown: unknown, extentDelayed: unknown, extentShared | extentNotAligned: unknown, extentShared | extentEncrypted: unknown,
	} {
		check.Equal(t, (extent{Flags: flags}).content(), want, "%#x", flags)
	}
}

// block is that of the tables below: offsets and lengths are given in blocks.
const block = sizeGrain

func extentAt(logical, physical, length uint64, flags uint32) extent {
	return extent{Logical: logical * block, Physical: physical * block, Length: length * block, Flags: flags}
}

func TestChangedExtents(t *testing.T) {
	for name, c := range map[string]struct {
		base, target []extent
		from         int64
		want         []span
	}{
		"nothing at all":       {},
		"the same":             {base: []extent{extentAt(1, 9, 4, extentShared)}, target: []extent{extentAt(1, 9, 4, extentShared)}},
		"the same, split":      {base: []extent{extentAt(1, 9, 4, extentShared)}, target: []extent{extentAt(1, 9, 1, extentShared), extentAt(2, 10, 3, extentShared)}},
		"elsewhere":            {base: []extent{extentAt(1, 9, 4, extentShared)}, target: []extent{extentAt(1, 8, 4, extentShared)}, want: []span{{1, 5}}},
		"not shared":           {base: []extent{extentAt(1, 9, 4, 0)}, target: []extent{extentAt(1, 9, 4, 0)}, want: []span{{1, 5}}},
		"shared with others":   {base: []extent{extentAt(1, 9, 4, extentShared)}, target: []extent{extentAt(1, 9, 4, 0)}, want: []span{{1, 5}}},
		"written in a hole":    {target: []extent{extentAt(3, 9, 2, 0)}, want: []span{{3, 5}}},
		"discarded":            {base: []extent{extentAt(3, 9, 2, extentShared)}, want: []span{{3, 5}}},
		"prepared only":        {target: []extent{extentAt(3, 9, 2, extentUnwritten)}},
		"written where it was": {base: []extent{extentAt(3, 9, 2, extentUnwritten)}, target: []extent{extentAt(3, 9, 2, 0)}, want: []span{{3, 5}}},
		"in the middle": {
			base:   []extent{extentAt(0, 10, 8, extentShared)},
			target: []extent{extentAt(0, 10, 3, extentShared), extentAt(3, 99, 1, 0), extentAt(4, 14, 4, extentShared)}, want: []span{{3, 4}},
		},
		"moved by one block": {base: []extent{extentAt(0, 10, 4, extentShared)}, target: []extent{extentAt(1, 10, 4, extentShared)}, want: []span{{0, 1}, {1, 4}, {4, 5}}},
		"from within":        {target: []extent{extentAt(2, 9, 4, 0)}, from: 4, want: []span{{4, 6}}},
		"beyond the end":     {target: []extent{extentAt(14, 9, 4, 0)}, want: []span{{14, 16}}},
	} {
		for _, atOnce := range []int{1, 2, 100} {
			var got, want []span
			for _, one := range c.want {
				want = append(want, span{one[0] * block, one[1] * block})
			}
			err := collect(c.from*block, 16*block, &got).changed(fakeExtents(16*block, atOnce, c.base...), fakeExtents(16*block, atOnce, c.target...), nil)
			diff := cmp.Diff(want, got)
			check.That(t, err == nil && diff == "", "%s, %d at once: %v, -want +got:\n%s", name, atOnce, err, diff)
		}
	}
}

// TestUnknownIsCompared: what extents do not prove is read, and nothing else is.
func TestUnknownIsCompared(t *testing.T) {
	base, target := make([]byte, 16*block), make([]byte, 16*block)
	target[5*block+7], target[6*block], target[15*block] = 1, 1, 1
	before := fakeExtents(16*block, 2, extentAt(0, 9, 4, extentShared), extentAt(4, 20, 8, extentEncoded))
	after := fakeExtents(16*block, 2, extentAt(0, 10, 1, extentShared), extentAt(1, 10, 3, extentShared), extentAt(4, 20, 8, extentEncoded))
	var got []span
	check.Must(t, compareOf(bytes.NewReader(base), bytes.NewReader(target)).run(t.Context(), collect(block, 16*block, &got), before, after))
	check.Same(t, cmp.Diff([]span{{5 * block, 6 * block}, {6 * block, 7 * block}}, got), "-want +got")
}

// TestEndlessExtents: extents that come again and again are an error, and no loop.
func TestEndlessExtents(t *testing.T) {
	image := &extents{size: 16 * block, fetch: func(int64, int64) ([]extent, bool, error) {
		return []extent{extentAt(0, 9, 1, 0)}, false, nil
	}}
	var got []span
	err := collect(0, 16*block, &got).allocated(image)
	check.That(t, err != nil && len(got) == 1, "%v, %v", got, err)
}

func TestWalkEndsWithItsCaller(t *testing.T) {
	stop := errors.New("stop")
	var got []span
	w := collect(0, 1<<50, &got)
	w.alive = func() error {
		if len(got) == 3 {
			return stop
		}
		return nil
	}
	err := w.allocated(fakeEndless{})
	check.That(t, errors.Is(err, stop) && len(got) == 3, "%d ranges: %v", len(got), err)
	got = nil
	err = w.changed(fakeEndless{}, fakeExtents(1<<50, 1), nil)
	check.That(t, errors.Is(err, stop) && len(got) == 3, "%d ranges: %v", len(got), err)
}

// fakeEndless has data in each second block, however large it is.
type fakeEndless struct{}

func (fakeEndless) piece(at int64) (piece, error) {
	p := piece{content: zeros, end: (at/block + 1) * block}
	if at/block%2 == 0 {
		p.content = private
	}
	return p, nil
}

// TestMessages merges ranges also where a message ends, and keeps no more than one message.
func TestMessages(t *testing.T) {
	for _, most := range []int{1, 2, 3, blocksAtOnce} {
		var sizes []int
		var got []span
		r := &reporter{most: most, send: func(blocks []*csi.BlockMetadata) error {
			sizes = append(sizes, len(blocks))
			for _, one := range blocks {
				got = append(got, span{one.GetByteOffset(), one.GetByteOffset() + one.GetSizeBytes()})
			}
			return nil
		}}
		for _, one := range []span{{0, 1}, {1, 3}, {4, 5}, {5, 6}, {6, 9}, {20, 30}, {30, 31}, {40, 41}} {
			check.Must(t, r.report(one[0], one[1]))
		}
		want := []span{{0, 3}, {4, 9}, {20, 31}, {40, 41}}
		for at := int64(100); at < 100+4*blocksAtOnce; at += 2 { // more than any message has
			want = append(want, span{at, at + 1})
			check.Must(t, r.report(at, at+1))
		}
		check.Must(t, r.end())
		diff := cmp.Diff(want, got)
		check.That(t, diff == "" && r.ranges == int64(len(want)) && r.bytes == 20+2*blocksAtOnce, "%d at most: %d ranges, %d bytes, -want +got:\n%s", most, r.ranges, r.bytes, diff)
		for _, n := range sizes {
			check.That(t, n <= most, "messages of %v, at most %d", sizes, most)
		}
	}
	told := 0
	check.Must(t, (&reporter{most: 1, send: func([]*csi.BlockMetadata) error { told++; return nil }}).end())
	check.That(t, told == 1, "%d messages, without any range", told)
}

// snapshots makes two volumes, one snapshot of each, and a later, larger one of the first.
func snapshots(t *testing.T, conn *grpc.ClientConn, images string) (first, later, foreign string) {
	t.Helper()
	controller := csi.NewControllerClient(conn)
	create := func(name string) string { return check.Value(created(t, controller, name, source{}))(t).GetVolumeId() }
	volume, other := create("v"), create("other")
	first, foreign = takeSnapshot(t, controller, "first", volume), takeSnapshot(t, controller, "foreign", other)
	check.Must(t, check.Err(controller.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{
		VolumeId: volume, CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * leastSize},
	})))
	image := &pool{images: images}
	file := check.Value(image.openImage(&record{ID: volume}, os.O_WRONLY))(t)
	_, err := file.WriteAt(bytes.Repeat([]byte("x"), block), 8*block)
	check.Must(t, errors.Join(err, file.Close()))
	return first, takeSnapshot(t, controller, "later", volume), foreign
}

func takeSnapshot(t *testing.T, controller csi.ControllerClient, name, volume string) (id string) {
	t.Helper()
	reply := check.Value(controller.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: volume}))(t)
	return reply.GetSnapshot().GetSnapshotId()
}

// TestIDsOfSnapshotsAreNotUsedAgain: an increment would be added to the backup of another snapshot with the same name.
func TestIDsOfSnapshotsAreNotUsedAgain(t *testing.T) {
	config, conn, _ := start(t, func(c *Config) { c.CopyLimit = 1 << 30 })
	controller, groups := csi.NewControllerClient(conn), csi.NewGroupControllerClient(conn)
	v := check.Value(created(t, controller, "v", source{}))(t).GetVolumeId()
	remove := func(id string) {
		t.Helper()
		check.Value(controller.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: id}))(t)
	}
	first := takeSnapshot(t, controller, "s", v)
	check.Equal(t, takeSnapshot(t, controller, "s", v), first, "the id when it is asked for again")
	remove(first)
	second := takeSnapshot(t, controller, "s", v)
	check.That(t, second != first, "%s is used again", first)
	remove(first) // again, which is not the second one
	check.Equal(t, takeSnapshot(t, controller, "s", v), second, "the id of the second")
	// One that an earlier version has made.
	records := store{dir: config.DataDir + "/volumes"}
	r := check.Value(records.load(second))(t)
	r.ID = "snap-" + fileName("s")[:32]
	check.Must(t, records.save(r))
	check.Equal(t, takeSnapshot(t, controller, "s", v), r.ID, "the id by an earlier version")
	remove(r.ID)
	check.That(t, takeSnapshot(t, controller, "s", v) != r.ID, "%s is used again", r.ID)

	group := func() *csi.VolumeGroupSnapshot {
		t.Helper()
		reply := check.Value(groups.CreateVolumeGroupSnapshot(t.Context(), &csi.CreateVolumeGroupSnapshotRequest{Name: "g", SourceVolumeIds: []string{v}}))(t)
		return reply.GetGroupSnapshot()
	}
	one := group()
	check.Equal(t, group().GetGroupSnapshotId(), one.GetGroupSnapshotId(), "the group's id when it is asked for again")
	check.Value(groups.DeleteVolumeGroupSnapshot(t.Context(), &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: one.GetGroupSnapshotId()}))(t)
	two := group()
	check.That(t, two.GetGroupSnapshotId() != one.GetGroupSnapshotId() && two.GetSnapshots()[0].GetSnapshotId() != one.GetSnapshots()[0].GetSnapshotId(), "%v", two)
}

// TestSlowComparison: what a stream has found is sent while it compares, and when the driver stops. Where it finds
// nothing, its client gets on as well.
func TestSlowComparison(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &snapshotMetadata{config: Config{Log: zap.NewNop()}, metrics: newMetrics(), slots: make(chan struct{}, 1), stopping: make(chan struct{})}
		sent, next := 0, int64(0) // ranges, and where a client would go on
		stream := func(size int64, run func(walk) error) error {
			return m.stream(t.Context(), opened{record: &record{Capacity: size}}, &csi.GetMetadataDeltaRequest{}, func(blocks []*csi.BlockMetadata) error {
				for _, one := range blocks {
					check.That(t, one.ByteOffset < next+200*compareStep, "byte %d comes after %d", one.ByteOffset, next)
					sent, next = sent+1, one.ByteOffset+one.SizeBytes
				}
				return nil
			}, run)
		}
		slow := imageFunc(func(into []byte, at int64) (int, error) { time.Sleep(flushEvery); return zeroImage()(into, at) })
		check.Must(t, stream(1000*compareStep, func(w walk) error { return compareOf(zeroImage(), slow).all(t.Context(), w) }))
		check.That(t, next > 800*compareStep, "without a change a client would still begin at byte %d", next)
		sent = 0
		err := stream(100, func(w walk) error {
			check.Must(t, errors.Join(w.report(0, 1), w.alive()))
			check.Equal(t, sent, 0, "ranges sent at once")
			time.Sleep(flushEvery)
			check.Must(t, errors.Join(w.alive(), w.report(2, 3), w.alive()))
			check.Equal(t, sent, 1, "ranges sent after a while")
			close(m.stopping)
			return w.alive()
		})
		check.Code(t, err, codes.Unavailable)
		check.Equal(t, sent, 2, "ranges sent in the end")
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		check.Code(t, m.alive(ctx), codes.Canceled)
	})
}

func deltaOf(stream csi.SnapshotMetadata_GetMetadataDeltaClient, err error) ([]span, error) {
	var got []span
	for err == nil {
		var reply *csi.GetMetadataDeltaResponse
		reply, err = stream.Recv()
		for _, one := range reply.GetBlockMetadata() {
			got = append(got, span{one.GetByteOffset(), one.GetByteOffset() + one.GetSizeBytes()})
		}
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return got, err
}

// TestSnapshotMetadata has the errors of CSI's table, and one answer.
func TestSnapshotMetadata(t *testing.T) {
	config, conn, _ := start(t, func(c *Config) { c.CopyLimit = 1 << 30 })
	first, later, foreign := snapshots(t, conn, config.DataDir+"/images")
	client := csi.NewSnapshotMetadataClient(conn)
	for name, c := range map[string]struct {
		base, target string
		from         int64
		most         int32
		want         codes.Code
		changed      []span
	}{
		"changed":           {base: first, target: later, changed: []span{{8 * block, 9 * block}, {leastSize, 2 * leastSize}}},
		"resumed":           {base: first, target: later, from: 9 * block, most: 1, changed: []span{{leastSize, 2 * leastSize}}},
		"from the end":      {base: first, target: later, from: 2 * leastSize},
		"from beyond":       {base: first, target: later, from: 2*leastSize + 1, want: codes.OutOfRange},
		"from before":       {base: first, target: later, from: -1, want: codes.OutOfRange},
		"negative most":     {base: first, target: later, most: -1, want: codes.InvalidArgument},
		"the wrong order":   {base: later, target: first, want: codes.InvalidArgument},
		"itself":            {base: first, target: first, want: codes.InvalidArgument},
		"of another volume": {base: foreign, target: later, want: codes.InvalidArgument},
		"no base":           {target: later, want: codes.InvalidArgument},
		"no target":         {base: first, want: codes.InvalidArgument},
		"unknown base":      {base: "snap-x", target: later, want: codes.NotFound},
		"unknown target":    {base: first, target: volumeID("v"), want: codes.NotFound},
	} {
		got, err := deltaOf(client.GetMetadataDelta(t.Context(), &csi.GetMetadataDeltaRequest{
			BaseSnapshotId: c.base, TargetSnapshotId: c.target, StartingOffset: c.from, MaxResults: c.most,
		}))
		diff := cmp.Diff(c.changed, got)
		check.That(t, status.Code(err) == c.want && diff == "", "%s: %v, -want +got:\n%s", name, err, diff)
	}
	wantAllocated(t, client, later)
}

func wantAllocated(t *testing.T, client csi.SnapshotMetadataClient, id string) {
	t.Helper()
	for _, c := range []struct {
		id   string
		from int64
		want codes.Code
	}{
		{id, 0, codes.OK}, {"", 0, codes.InvalidArgument}, {"snap-x", 0, codes.NotFound}, {volumeID("v"), 0, codes.NotFound},
		{id, -1, codes.OutOfRange}, {id, 2*leastSize + 1, codes.OutOfRange},
	} {
		stream := check.Value(client.GetMetadataAllocated(t.Context(), &csi.GetMetadataAllocatedRequest{SnapshotId: c.id, StartingOffset: c.from}))(t)
		reply, err := stream.Recv()
		check.That(t, status.Code(err) == c.want, "%q from %d: %v", c.id, c.from, err)
		check.That(t, err != nil || reply.GetVolumeCapacityBytes() == 2*leastSize && reply.GetBlockMetadataType() == csi.BlockMetadataType_VARIABLE_LENGTH &&
			len(reply.GetBlockMetadata()) == 1 && reply.GetBlockMetadata()[0].GetByteOffset() == 8*block, "%v", reply)
	}
}

// TestOrderOfSnapshotsIsNotTheClocks: a clock that was set back between two snapshots
// changes nothing, and neither does a snapshot that was deleted.
func TestOrderOfSnapshotsIsNotTheClocks(t *testing.T) {
	config, conn, _ := start(t, func(c *Config) { c.CopyLimit = 1 << 30 })
	first, later, _ := snapshots(t, conn, config.DataDir+"/images")
	records := store{dir: config.DataDir + "/volumes"}
	ahead := check.Value(records.load(first))(t)
	ahead.Created = time.Now().Add(time.Hour)
	check.Must(t, records.save(ahead))
	client := csi.NewSnapshotMetadataClient(conn)
	wantOrder := func(base, target string) {
		t.Helper()
		check.Must(t, check.Err(deltaOf(client.GetMetadataDelta(t.Context(), &csi.GetMetadataDeltaRequest{BaseSnapshotId: base, TargetSnapshotId: target}))))
		check.Code(t, check.Err(deltaOf(client.GetMetadataDelta(t.Context(), &csi.GetMetadataDeltaRequest{BaseSnapshotId: target, TargetSnapshotId: base}))), codes.InvalidArgument) // in the wrong order
	}
	wantOrder(first, later)
	controller := csi.NewControllerClient(conn)
	check.Value(controller.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: later}))(t)
	wantOrder(first, takeSnapshot(t, controller, "latest", volumeID("v")))
}

// TestNobodyReadsAStream, and the driver stops all the same.
func TestNobodyReadsAStream(t *testing.T) {
	config := alone(t)
	d := check.Value(New(config))(t)
	manyRanges(t, d.metadata.pool)
	d.patience = 50 * time.Millisecond

	stop := check.Running(t, d.Run)
	conn := dial(t, config.Endpoint, grpc.WithInitialWindowSize(1<<16)) // no more is sent until it is read
	stream := check.Value(csi.NewSnapshotMetadataClient(conn).GetMetadataAllocated(t.Context(), &csi.GetMetadataAllocatedRequest{SnapshotId: "many", MaxResults: 1}))(t)
	check.Must(t, check.Err(stream.Recv()))
	check.Eventually(t, "the driver waits for its client", func() bool {
		stacks := make([]byte, 1<<20)
		return bytes.Contains(stacks[:runtime.Stack(stacks, true)], []byte("transport.(*writeQuota).get"))
	})
	ended := check.Begin(func() error { stop(); return nil })
	for pauses := 0; len(ended) == 0; pauses++ { // a busy machine makes them longer, as it does the driver's
		check.Require(t, pauses < 100, "the driver does not end by its own patience")
		time.Sleep(100 * time.Millisecond)
	}
}

// manyRanges makes a snapshot whose blocks are data and holes in turn: more ranges than a client gets without reading.
func manyRanges(t *testing.T, in *pool) {
	t.Helper()
	const ranges = 10000
	r := &record{Version: recordVersion, ID: "many", Capacity: 2 * ranges * block, Snapshot: &snapshot{}}
	check.Must(t, in.provision(r, 0, func() error {
		image := check.Value(os.Create(in.image(r.ID)))(t)
		err := image.Truncate(r.Capacity)
		for n := int64(0); n < ranges && err == nil; n++ {
			_, err = image.WriteAt([]byte("x"), 2*n*block)
		}
		return errors.Join(err, image.Close())
	}))
}

func compareOf(base, target io.ReaderAt) *comparison {
	return &comparison{base: base, target: target, free: newBuffers()}
}

// unknowns is the layout of an image of which nothing is known.
func unknowns(size int64) layout {
	return fakeExtents(size, 1, extent{Length: uint64(size), Flags: extentEncoded})
}

// all compares images of which nothing is known.
func (c *comparison) all(ctx context.Context, w walk) error {
	return c.run(ctx, w, unknowns(w.to), unknowns(w.to))
}

// TestComparison compares images of random changes with a plain loop.
func TestComparison(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	const size = 3*compareStep + 5*block + 77
	for range 50 {
		base, target := make([]byte, size), make([]byte, size)
		for range random.IntN(20) {
			target[random.IntN(size)] = 1
		}
		from := random.Int64N(size)
		var want, got []span
		for at := from; at < size; {
			end := min((at/block+1)*block, size)
			if !bytes.Equal(base[at:end], target[at:end]) {
				want = append(want, span{at, end})
			}
			at = end
		}
		check.Must(t, compareOf(bytes.NewReader(base), bytes.NewReader(target)).all(t.Context(), collect(from, size, &got)))
		diff := cmp.Diff(want, got)
		check.Require(t, diff == "", "from %d, -want +got:\n%s", from, diff)
	}
}

func TestComparisonOfAShortImage(t *testing.T) {
	var got []span
	short := compareOf(bytes.NewReader(make([]byte, block)), bytes.NewReader(make([]byte, 2*block)))
	err := short.all(t.Context(), collect(0, 2*block, &got))
	check.That(t, errors.Is(err, io.EOF) && len(got) == 0, "%v, %v", err, got)
}

// imageFunc is an image that is made as it is read.
type imageFunc func(into []byte, at int64) (int, error)

func (f imageFunc) ReadAt(into []byte, at int64) (int, error) { return f(into, at) }

// TestComparisonIsParallel: as many reads as there are buffers wait for each other, and
// the later ones end first. What is reported ascends all the same.
func TestComparisonIsParallel(t *testing.T) {
	const size = 8 * comparedAtOnce * compareStep
	turns := make([]chan struct{}, size/compareStep)
	for n := range turns {
		turns[n] = make(chan struct{})
	}
	var reading, most atomic.Int64
	target := imageFunc(func(into []byte, at int64) (int, error) {
		most.Store(max(most.Load(), reading.Add(1)))
		defer reading.Add(-1)
		n := int(at / compareStep)
		if n%comparedAtOnce < comparedAtOnce-1 {
			select {
			case <-turns[n+1]:
			case <-time.After(20 * time.Second):
				return 0, errors.New("the next step is not read at the same time")
			}
		}
		close(turns[n])
		into[0] = 1
		return len(into), nil
	})
	var got []span
	check.Must(t, compareOf(zeroImage(), target).all(t.Context(), collect(0, size, &got)))
	for n, one := range got {
		check.Require(t, one == (span{int64(n) * compareStep, int64(n)*compareStep + block}), "range %d is %v", n, one)
	}
	check.That(t, len(got) == len(turns) && most.Load() <= comparedAtOnce, "%d ranges, %d reads at once", len(got), most.Load())
}

func zeroImage() imageFunc {
	return func(into []byte, _ int64) (int, error) { clear(into); return len(into), nil }
}

// TestComparisonWaitsForItsClient: who does not read a stream has little of the images
// read, and holds none of the buffers.
func TestComparisonWaitsForItsClient(t *testing.T) {
	const size = int64(1) << 40
	var reads atomic.Int64
	compare := compareOf(zeroImage(), imageFunc(func(into []byte, _ int64) (int, error) {
		reads.Add(1)
		into[0] = 1
		return len(into), nil
	}))
	gone := errors.New("the client has gone")
	w := collect(0, size, new([]span))
	w.report = func(int64, int64) error {
		check.Eventually(t, "no more is read", func() bool { return reads.Load() >= knownAhead && len(compare.free) == comparedAtOnce })
		return gone
	}
	check.Is(t, compare.all(t.Context(), w), gone)
	n := reads.Load()
	check.That(t, n <= knownAhead+comparedAtOnce+1 && len(compare.free) == comparedAtOnce,
		"%d steps were read, %d buffers are free", n, len(compare.free))
}

// TestComparisonEndsWithItsCaller, also while all buffers are in use elsewhere.
func TestComparisonEndsWithItsCaller(t *testing.T) {
	compare := compareOf(zeroImage(), zeroImage())
	for range comparedAtOnce {
		<-compare.free
	}
	check.Is(t, compare.all(check.Within(t, 20*time.Millisecond), collect(0, 1<<40, new([]span))), context.DeadlineExceeded)
}

// TestHolesAreNotRead, on either side.
func TestHolesAreNotRead(t *testing.T) {
	unread := imageFunc(func([]byte, int64) (int, error) { return 0, errors.New("a hole is read") })
	data := make([]byte, 8*block)
	data[5*block] = 1
	hole := func() layout { return fakeExtents(8*block, 1) }
	for name, c := range map[string]struct {
		compare       *comparison
		before, after layout
	}{
		"before": {compareOf(unread, bytes.NewReader(data)), hole(), unknowns(8 * block)},
		"after":  {compareOf(bytes.NewReader(data), unread), unknowns(8 * block), hole()},
	} {
		var got []span
		err := c.compare.run(t.Context(), collect(0, 8*block, &got), c.before, c.after)
		diff := cmp.Diff([]span{{5 * block, 6 * block}}, got)
		check.That(t, err == nil && diff == "", "%s: %v, -want +got:\n%s", name, err, diff)
	}
	var got []span
	check.Must(t, compareOf(unread, unread).run(t.Context(), collect(0, 1<<50, &got), fakeExtents(1<<50, 1), fakeExtents(1<<50, 1)))
}
