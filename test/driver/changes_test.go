//go:build system

package driver_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/snapshots"
)

// imageOf is the file of a volume or a snapshot.
func (r *testDriver) imageOf(id string) string { return snapshots.Image(r.data, id) }

// blockRange is a range that a stream has named.
type blockRange struct{ from, to int64 }

type blockMessage interface {
	GetBlockMetadataType() csi.BlockMetadataType
	GetVolumeCapacityBytes() int64
	GetBlockMetadata() []*csi.BlockMetadata
}

// readStream reads a stream to its end, and checks what CSI demands of each.
func readStream[M blockMessage](t *testing.T, receive func() (M, error), from int64, most int32) (all []blockRange) {
	t.Helper()
	for last := int64(-1); ; {
		message, err := receive()
		if errors.Is(err, io.EOF) {
			return all
		}
		check.Must(t, err)
		capacity := message.GetVolumeCapacityBytes()
		check.Require(t, message.GetBlockMetadataType() == csi.BlockMetadataType_VARIABLE_LENGTH &&
			(most <= 0 || len(message.GetBlockMetadata()) <= int(most)), "at most %d: %v", most, message)
		for _, one := range message.GetBlockMetadata() {
			next := blockRange{one.GetByteOffset(), one.GetByteOffset() + one.GetSizeBytes()}
			check.Require(t, next.from > last && next.to > max(next.from, from) && next.to <= capacity,
				"%v after %d, from %d of %d bytes", next, last, from, capacity)
			last, all = next.to, append(all, next)
		}
	}
}

func (r *testDriver) allocated(id string, from int64, most int32) []blockRange {
	r.t.Helper()
	stream := check.Value(csi.NewSnapshotMetadataClient(r.conn).GetMetadataAllocated(r.t.Context(),
		&csi.GetMetadataAllocatedRequest{SnapshotId: id, StartingOffset: from, MaxResults: most}))(r.t)
	return readStream(r.t, stream.Recv, from, most)
}

func (r *testDriver) delta(base, target string, from int64, most int32) []blockRange {
	r.t.Helper()
	stream := check.Value(csi.NewSnapshotMetadataClient(r.conn).GetMetadataDelta(r.t.Context(),
		&csi.GetMetadataDeltaRequest{BaseSnapshotId: base, TargetSnapshotId: target, StartingOffset: from, MaxResults: most}))(r.t)
	return readStream(r.t, stream.Recv, from, most)
}

type kept struct {
	id      string
	content []byte
}

// history is a volume, its snapshots, and a model of them all in memory.
type history struct {
	*volume
	random *rand.Rand
	// file is by what the volume is written to: its image, or the device when it is attached.
	file     *os.File
	attached bool
	content  []byte
	kept     []kept // from the oldest on
	made     *int   // snapshots and volumes, of all histories
	// exact: a delta names no block that did not change, unless it takes long.
	exact bool
}

const (
	slowStream  = 5 * time.Second // after which the driver names blocks that did not change
	historySize = 4 * mib
	historyMost = 8 * mib
)

// write writes bytes of one kind; every fourth time zeros, and sometimes what is there.
func (h *history) write() {
	h.t.Helper()
	at := h.random.IntN(len(h.content))
	part := h.content[at:min(at+1+h.random.IntN(128<<10), len(h.content))]
	if h.random.IntN(8) > 0 {
		fill := byte(0)
		if h.random.IntN(4) > 0 {
			fill = byte(h.random.IntN(256))
		}
		copy(part, bytes.Repeat([]byte{fill}, len(part)))
	}
	check.Must(h.t, check.Err(h.file.WriteAt(part, int64(at))))
}

func (h *history) discard() {
	h.t.Helper()
	at := h.random.IntN(len(h.content)) / 4096 * 4096
	part := h.content[at:min(at+(1+h.random.IntN(64))*4096, len(h.content))]
	check.Must(h.t, unix.Fallocate(int(h.file.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(at), int64(len(part))))
	clear(part)
}

// change writes to the volume a few times.
func (h *history) change() {
	h.t.Helper()
	for range 1 + h.random.IntN(4) {
		if h.random.IntN(4) == 0 {
			h.discard()
			continue
		}
		h.write()
	}
}

// take makes a snapshot. What was written to a device has to leave the node's cache; what
// was written to the image itself is left there.
func (h *history) take() {
	h.t.Helper()
	if len(h.kept) > 7 {
		h.forget()
	}
	if h.attached {
		check.Must(h.t, h.file.Sync())
	}
	*h.made++
	made := check.Value(h.snapshot(fmt.Sprint("s", *h.made)))(h.t)
	h.kept = append(h.kept, kept{id: made.GetSnapshotId(), content: bytes.Clone(h.content)})
}

func (h *history) forget() {
	h.t.Helper()
	if len(h.kept) > 0 {
		at := h.random.IntN(len(h.kept))
		check.Must(h.t, h.removeSnapshot(h.kept[at].id))
		h.kept = append(h.kept[:at:at], h.kept[at+1:]...)
	}
}

func (h *history) growSome() {
	h.t.Helper()
	bytes := min(int64(len(h.content))+mib/2, historyMost)
	h.grow(bytes)
	if h.attached {
		check.Must(h.t, h.growNode(h.target, bytes))
	}
	h.content = append(h.content, make([]byte, bytes-int64(len(h.content)))...)
}

// apply has a backup take over the ranges of a snapshot. What the backup does not have
// yet, beyond its end, is not what it should be.
func (h *history) apply(backup []byte, ranges []blockRange, of kept) []byte {
	h.t.Helper()
	image := check.Value(os.Open(h.imageOf(of.id)))(h.t)
	defer func() { _ = image.Close() }()
	result := append(bytes.Clone(backup), bytes.Repeat([]byte{0xee}, len(of.content)-len(backup))...)
	for _, one := range ranges {
		check.Must(h.t, check.Err(image.ReadAt(result[one.from:one.to], one.from)))
	}
	return result
}

func (h *history) want(what string, got, want []byte) {
	h.t.Helper()
	for at := 0; !bytes.Equal(got, want) && at < len(want); at++ {
		check.Require(h.t, got[at] == want[at], "%s: byte %d of %d is %#x instead of %#x", what, at, len(want), got[at], want[at])
	}
}

// check rebuilds a snapshot in two ways: from nothing, and from an earlier one.
func (h *history) check() {
	h.t.Helper()
	if len(h.kept) == 0 {
		return
	}
	most := int32(h.random.IntN(4))
	of := h.random.IntN(len(h.kept))
	target := h.kept[of]
	h.want("allocated", h.apply(make([]byte, len(target.content)), h.allocated(target.id, 0, most), target), target.content)
	if of == 0 {
		return
	}
	base := h.kept[h.random.IntN(of)]
	began := time.Now()
	changed := h.delta(base.id, target.id, 0, most)
	exact := h.exact && time.Since(began) < slowStream
	h.want("delta", h.apply(base.content, changed, target), target.content)
	h.wantResumed(base, target)
	for _, one := range changed {
		for at := one.from; exact && at < min(one.to, int64(len(base.content))); at += 4096 {
			check.Require(h.t, !bytes.Equal(base.content[at:at+4096], target.content[at:at+4096]),
				"%v is named, and did not change at byte %d", one, at)
		}
	}
}

// wantResumed begins in the middle, as a client whose stream was cut off.
func (h *history) wantResumed(base, target kept) {
	h.t.Helper()
	from := h.random.Int64N(int64(len(target.content)) + 1)
	cut := bytes.Clone(target.content[:from])
	got := h.apply(append(cut, base.content[min(from, int64(len(base.content))):]...), h.delta(base.id, target.id, from, 0), target)
	h.want("resumed", got, target.content)
}

// step does one of the things that can happen to a volume.
func (h *history) step() {
	h.t.Helper()
	switch n := h.random.IntN(100); {
	case n < 45:
		h.change()
	case n < 65:
		h.take()
	case n < 70:
		h.forget()
	case n < 73 && int64(len(h.content)) < historyMost:
		h.growSome()
	default:
		h.check()
	}
}

// clone begins another history with the content of the volume, or of one of its snapshots.
func (h *history) clone() *history {
	h.t.Helper()
	*h.made++
	v, source, content := h.volume.volume(fmt.Sprint("v", *h.made), rig.BlockAccess()), h.asSource(), h.content
	if n := len(h.kept); n > 0 && h.random.IntN(2) == 0 {
		of := h.kept[h.random.IntN(n)]
		source, content = snapshotSource(of.id), of.content
	} else if h.attached {
		check.Must(h.t, h.file.Sync())
	}
	check.Must(h.t, v.createFrom(source, 0))
	return &history{volume: v, random: h.random, file: openToWrite(h.t, h.imageOf(v.id)), content: bytes.Clone(content), made: h.made, exact: h.exact}
}

// openToWrite opens a file that a test which fails leaves open.
func openToWrite(t *testing.T, path string) *os.File {
	t.Helper()
	file := check.Value(os.OpenFile(path, os.O_RDWR, 0))(t)
	t.Cleanup(func() { _ = file.Close() })
	return file
}

// end removes the volume, rebuilds each snapshot that it leaves from the one before, and removes these.
func (h *history) end() {
	h.t.Helper()
	check.Must(h.t, h.file.Close())
	h.down()
	if len(h.kept) > 0 {
		first := h.kept[0]
		backup := h.apply(make([]byte, len(first.content)), h.allocated(first.id, 0, 0), first)
		for i, one := range h.kept[1:] { // kept[i] is the one before
			backup = h.apply(backup, h.delta(h.kept[i].id, one.id, 0, 0), one)
			h.want("chain", backup, one.content)
		}
	}
	for len(h.kept) > 0 {
		h.forget()
	}
}

// histories is a volume and its clones, which share data with each other.
type histories struct {
	all    []*history
	random *rand.Rand
}

const mostHistories = 3

func (w *histories) run(long time.Duration) {
	for steps, began := 0, time.Now(); steps < 100 || time.Since(began) < long; steps++ {
		at := w.random.IntN(len(w.all))
		switch n := w.random.IntN(100); {
		case n < 2 && len(w.all) < mostHistories:
			w.all = append(w.all, w.all[at].clone())
		case n < 3 && len(w.all) > 1:
			w.all[at].end()
			w.all = append(w.all[:at:at], w.all[at+1:]...)
		case n < 4:
			w.all[at].restart()
		default:
			w.all[at].step()
		}
	}
	for _, h := range w.all {
		h.end()
	}
}

// TestChangedBlocks changes a volume and its clones at random and rebuilds their snapshots
// by their allocated and changed blocks alone: on filesystems that share data, that share
// and compress it, and that copy it. CRUST_SEED repeats a run.
func TestChangedBlocks(t *testing.T) {
	seed := rig.Seed(t)
	for _, c := range []struct {
		pool            string
		attach, packing bool
	}{{"xfs", true, false}, {"xfs", false, false}, {"btrfs", true, false}, {"btrfs", false, true}, {"ext4", false, false}} {
		t.Run(fmt.Sprintf("%s attached=%v compressed=%v", c.pool, c.attach, c.packing), func(t *testing.T) {
			r := newDriverOn(t, c.pool, false)
			if c.packing {
				rig.Command(t, "btrfs", "property", "set", r.data+"/images", "compression", "zstd")
			}
			v := r.volume("v", rig.BlockAccess())
			check.Must(t, v.createFrom(nil, historySize))
			path := r.imageOf(v.id)
			if c.attach {
				v.must(v.stage, v.publish)
				path = v.target
			}
			first := &history{
				volume: v, random: rand.New(rand.NewPCG(seed, seed)), file: openToWrite(t, path), attached: c.attach,
				content: make([]byte, historySize), made: new(int), exact: c.pool == "ext4",
			}
			(&histories{all: []*history{first}, random: first.random}).run(rig.RaceTime())
		})
	}
}
