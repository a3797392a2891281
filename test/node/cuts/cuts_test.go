package cuts

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
)

const (
	sector   = 512
	diskSize = 2 * MarkSpace
)

// logged is a log as QEMU writes one.
type logged struct {
	bytes.Buffer
	entries uint64
}

func (l *logged) add(flags uint64, offset int64, data []byte) {
	head := make([]byte, sector)
	for i, v := range []uint64{uint64(offset / sector), uint64(len(data) / sector), flags, 0} {
		binary.LittleEndian.PutUint64(head[8*i:], v)
	}
	_, _ = l.Write(append(head, data...)) // a buffer takes it
	l.entries++
}

func (l *logged) mark(slot int64, mark Mark) {
	raw, _ := json.Marshal(mark) // it is plain
	l.add(0, diskSize-MarkSpace+slot*BlockSize, append(raw, make([]byte, BlockSize-len(raw))...))
}

func (l *logged) raw() []byte {
	super := make([]byte, sector)
	for i, v := range []uint64{logMagic, logVersion, l.entries} {
		binary.LittleEndian.PutUint64(super[8*i:], v)
	}
	binary.LittleEndian.PutUint32(super[24:], sector)
	return append(super, l.Bytes()...)
}

func (l *logged) read(t *testing.T) *Log {
	t.Helper()
	read := check.Value(ReadLog(bytes.NewReader(l.raw())))(t)
	return read
}

func fill(b byte, blocks int) []byte { return bytes.Repeat([]byte{b}, blocks*BlockSize) }

func image(t *testing.T, begin []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "image")
	check.Must(t, os.WriteFile(path, begin, 0o600))
	check.Must(t, os.Truncate(path, diskSize))
	return path
}

// TestTheCacheIsLost: what was flushed is always there, and all of what was not may be there or not, also a part of a write.
func TestTheCacheIsLost(t *testing.T) {
	var l logged
	l.add(0, 0, fill('a', 1))
	l.add(0, BlockSize, fill('b', 2))
	l.add(flagFlush, 0, nil)
	l.add(0, 4*BlockSize, fill('c', 2))
	l.add(0, 0, fill('d', 1))
	l.add(flagFlush, 0, nil)
	log := l.read(t)
	disk := check.Value(OpenDisk(image(t, fill('x', 8))))(t)
	defer func() { check.Must(t, disk.Close()) }()
	into := check.Value(os.OpenFile(image(t, fill('y', 20)), os.O_RDWR, 0))(t)
	r, seen := rand.New(rand.NewPCG(1, 1)), make(map[string]bool)
	state := func() string {
		check.Must(t, disk.Cut(r, into))
		content := make([]byte, 10*BlockSize)
		check.Must(t, check.Err(into.ReadAt(content, 0)))
		var firsts []byte
		for at := 0; at < len(content); at += BlockSize {
			firsts = append(firsts, content[at]|' ')
		}
		return string(firsts)
	}
	check.Must(t, disk.Advance(log, 5))
	for range 500 {
		seen[state()] = true
	}
	for _, possible := range []string{"abbxxxxx  ", "dbbxxxxx  ", "abbxccxx  ", "abbxcxxx  ", "abbxxcxx  ", "dbbxccxx  ", "dbbxxcxx  ", "dbbxcxxx  "} {
		check.That(t, seen[possible], "%q does not happen", possible)
		delete(seen, possible)
	}
	check.That(t, len(seen) == 0, "%v happens", seen)
	check.Must(t, disk.Advance(log, 6))
	for range 20 {
		got := state()
		check.That(t, got == "dbbxccxx  ", "%q after a flush", got)
	}
}

// TestBlocksAreWhole: a write is torn apart at the borders of blocks.
func TestBlocksAreWhole(t *testing.T) {
	var sizes []int
	for _, w := range blocks(write{BlockSize - sector, make([]byte, 2*BlockSize)}) {
		sizes = append(sizes, len(w.data))
	}
	check.That(t, slices.Equal(sizes, []int{sector, BlockSize, BlockSize - sector}), "%v", sizes)
}

func TestLogsThatAreNone(t *testing.T) {
	var l logged
	l.add(0, 0, fill('a', 1))
	good := l.raw()
	l.add(4, 0, nil) // a discard
	for name, raw := range map[string][]byte{
		"empty": nil, "zeros": make([]byte, BlockSize), "cut off": good[:sector], "with a discard": l.raw(),
	} {
		check.That(t, check.Err(ReadLog(bytes.NewReader(raw))) != nil, "%s: it is read", name)
	}
	log := check.Value(ReadLog(io.NewSectionReader(bytes.NewReader(good), 0, 3*sector)))(t)
	check.Fails(t, check.Err(log.Data(log.Entries[0]))) // or data that is not there is read
}

// TestWhatMayBe: before a call there is what was, during the call that or what it makes, and after it only that.
func TestWhatMayBe(t *testing.T) {
	makes, writes, removes := map[string]string{"size a": "1"}, map[string]string{"content a": "x"}, map[string]string{"size a": ""}
	var l logged
	l.mark(0, Mark{Sets: makes})
	l.add(flagFlush, 0, nil)
	l.mark(1, Mark{Sets: makes, Done: true})
	l.mark(2, Mark{Sets: writes, Loose: true})
	l.mark(3, Mark{Sets: writes, Done: true})
	l.mark(4, Mark{Sets: removes})
	log := l.read(t)
	marks := check.Value(Marks(log, diskSize))(t)
	points := Points(log, marks, 0, rand.New(rand.NewPCG(1, 1)))
	check.That(t, slices.Equal(points, []int{1, 3, 5}), "the power is cut at %v", points)
	expected := new(Expected)
	for i, may := range [][]map[string]string{
		{nil, makes},
		nil,
		{makes},
		{makes, {"size a": "1", "content a": "torn"}},
		{{"size a": "1", "content a": "x"}},
		{{"size a": "1", "content a": "x"}, writes},
	} {
		if mark, is := marks[i]; is {
			expected.Add(mark)
		}
		for _, found := range may {
			faults := expected.Compare(found)
			check.That(t, len(faults) == 0, "after entry %d: %q", i, faults)
		}
	}
	check.That(t, slices.Equal(expected.Named("size"), []string{"a"}), "%q", expected.Named("size"))
	for _, found := range []map[string]string{nil, {"size a": "2", "content a": "x"}, {"size a": "1", "content a": "torn"}, {"content a": "x", "size b": "1"}} {
		check.That(t, len(expected.Compare(found)) > 0, "%v is no fault", found)
	}
}
