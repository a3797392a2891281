package superblock

import (
	"encoding/binary"
	"errors"
	"io"
	"math"
	"sort"
)

// Where an xfs superblock has what is read of it (big endian).
const (
	xfsBlockSize = 4
	xfsDBlocks   = 8
	xfsLogStart  = 48
	xfsAGBlocks  = 84
	xfsAGCount   = 88
	xfsLogBlocks = 96
	xfsAGBlkLog  = 124
	xfsUsed      = 264
)

// xfsGeometry is what is needed of an xfs superblock, checked.
type xfsGeometry struct {
	block            int64 // the size of one
	blocks           int64
	logAt, logBlocks int64  // of 512 bytes, from the start of the device; 0 without an internal log
	raw              []byte // the superblock itself
}

func readXFS(device io.ReaderAt) (*Super, error) {
	g, err := readXFSGeometry(device)
	if err != nil {
		return nil, err
	}
	log, rest := g.logBlocks*512, int64(0)
	if group := int64(binary.BigEndian.Uint32(g.raw[xfsAGBlocks:])); group > 0 && g.blocks%group == 0 {
		rest = 16 << 20 // mkfs makes no smaller group
	}
	// statfs leaves out an internal log.
	return &Super{Bytes: g.blocks*g.block - log, Exact: true, Root: xfsRoot(device, g), log: log, rest: rest}, nil
}

func readXFSGeometry(device io.ReaderAt) (*xfsGeometry, error) {
	raw, err := page(device, 0, xfsUsed)
	if err != nil {
		return nil, err
	}
	be := binary.BigEndian
	block, blocks := int64(be.Uint32(raw[xfsBlockSize:])), be.Uint64(raw[xfsDBlocks:])
	switch {
	case string(raw[:4]) != "XFSB":
		return nil, ErrNone
	case block < 512 || block > 64<<10 || block&(block-1) != 0 || blocks == 0 || blocks > uint64(math.MaxInt64/block):
		return nil, ErrDamaged
	}
	g := &xfsGeometry{raw: raw, block: block, blocks: int64(blocks)} //nolint:gosec // bounded above
	start := be.Uint64(raw[xfsLogStart:])
	if start == 0 {
		return g, nil // the log is on another device
	}
	// The log's start is given as a group and a block in it.
	groupBlocks, bits := int64(be.Uint32(raw[xfsAGBlocks:])), raw[xfsAGBlkLog]
	logBlocks := int64(be.Uint32(raw[xfsLogBlocks:]))
	at := int64(start>>bits)*groupBlocks + int64(start&(1<<bits-1)) //nolint:gosec // at most 2^32 groups of 2^31 blocks, see below
	if bits > 31 || start>>bits >= uint64(be.Uint32(raw[xfsAGCount:])) || at <= 0 || at > g.blocks || logBlocks == 0 || logBlocks > g.blocks-at {
		return nil, ErrDamaged
	}
	g.logAt, g.logBlocks = at*(block/512), logBlocks*(block/512)
	return g, nil
}

// NeedsReplay reports whether a filesystem can be used only after its journal or log was replayed, which writes to the
// device: it was not unmounted cleanly. It returns false if that is not known.
func NeedsReplay(device io.ReaderAt, fsType string) (bool, error) {
	if fsType != "xfs" {
		super, err := Read(device, fsType)
		return err == nil && super.Replay, err
	}
	g, err := readXFSGeometry(device)
	if err != nil || g.logBlocks == 0 {
		return false, err
	}
	return (&xfsLog{device: device, geometry: g}).dirty()
}

// What the kernel's xfs_log_format.h says. The log is a ring of blocks of 512 bytes. Each begins with the number of the
// round in which it was written, or is the header of a record, which has that number after its magic.
const (
	xlogBlock       = 512
	xlogMagic       = 0xfeedbabe
	xlogVersion2    = 2
	xlogHeaderCycle = 4
	xlogVersion     = 8
	xlogLength      = 12
	xlogOps         = 40
	xlogRecordSize  = 320
	xlogHeaderSpan  = 32 << 10 // of a record that one header block covers
	xlogMostRecord  = 256 << 10
	xlogOpFlags     = 9
	xlogUnmount     = 0x20
	// xlogMostBlocks is how long a record with its headers is at most.
	xlogMostBlocks = (xlogMostRecord + xlogMostRecord/xlogHeaderSpan*xlogBlock) / xlogBlock
)

// xfsLog reads a log. Its first error stays, so that callers check it once.
type xfsLog struct {
	device   io.ReaderAt
	geometry *xfsGeometry
	cached   []byte
	at       int64
	err      error
}

// dirty does a part of what the kernel does (xlog_find_tail): the log is clean if the last
// record in it is that of an unmount, and ends at its head.
func (l *xfsLog) dirty() (bool, error) {
	n := l.geometry.logBlocks
	first, last := l.cycle(0), l.cycle(n-1)
	if l.err != nil || first == 0 {
		return false, l.err // nothing was ever written
	}
	// The head is where the blocks of the round before begin.
	head := n
	if first != last {
		head = int64(sort.Search(int(n), func(i int) bool { return l.cycle(int64(i)) == last }))
	}
	for back := int64(1); back <= min(xlogMostBlocks, n) && l.err == nil; back++ {
		at := (head - back + n) % n
		if header := l.block(at); header != nil && binary.BigEndian.Uint32(header) == xlogMagic {
			clean := l.isUnmount(header, at, back)
			return !clean && l.err == nil, l.err
		}
	}
	return false, l.err
}

// isUnmount reports whether a record is that of an unmount and ends at the head, which is
// ahead blocks after the start of the record.
func (l *xfsLog) isUnmount(header []byte, at, ahead int64) bool {
	be := binary.BigEndian
	headers := int64(1)
	if size := int64(be.Uint32(header[xlogRecordSize:])); be.Uint32(header[xlogVersion:])&xlogVersion2 != 0 && size > xlogHeaderSpan {
		headers = (size + xlogHeaderSpan - 1) / xlogHeaderSpan
	}
	length := (int64(be.Uint32(header[xlogLength:])) + xlogBlock - 1) / xlogBlock
	if be.Uint32(header[xlogOps:]) != 1 || headers+length != ahead {
		return false
	}
	op := l.block((at + headers) % l.geometry.logBlocks)
	return op != nil && op[xlogOpFlags]&xlogUnmount != 0
}

func (l *xfsLog) cycle(i int64) uint32 {
	block := l.block(i)
	if block == nil {
		return 0
	}
	if binary.BigEndian.Uint32(block) == xlogMagic {
		return binary.BigEndian.Uint32(block[xlogHeaderCycle:])
	}
	return binary.BigEndian.Uint32(block)
}

// block returns a block of the log, valid until the next call, or nil after an error.
func (l *xfsLog) block(i int64) []byte {
	at := (l.geometry.logAt + i) * xlogBlock
	start := at &^ (pageSize - 1)
	if l.err == nil && (l.at != start || int(at-start)+xlogBlock > len(l.cached)) {
		l.cached, l.err = page(l.device, start, int(at-start)+xlogBlock)
		l.at = start
		if errors.Is(l.err, ErrNone) {
			l.err = ErrDamaged // it ends before its log
		}
	}
	if l.err != nil {
		return nil
	}
	return l.cached[at-start : at-start+xlogBlock]
}
