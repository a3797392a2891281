package superblock

import (
	"encoding/binary"
	"io"
	"math"
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
	// statfs leaves out an internal log.
	return &Super{Bytes: g.blocks*g.block - g.logBlocks*512, Exact: true, Root: xfsRoot(device, g)}, nil
}

func readXFSGeometry(device io.ReaderAt) (*xfsGeometry, error) {
	raw, err := page(device, 0, xfsUsed)
	if err != nil {
		return nil, err
	}
	be := binary.BigEndian
	block, blocks := int64(be.Uint32(raw[xfsBlockSize:])), be.Uint64(raw[xfsDBlocks:])
	if string(raw[:4]) != "XFSB" || block < 512 || block > 64<<10 || block&(block-1) != 0 ||
		blocks == 0 || blocks > uint64(math.MaxInt64/block) {
		return nil, ErrNone
	}
	g := &xfsGeometry{raw: raw, block: block, blocks: int64(blocks)} //nolint:gosec // bounded above
	start := be.Uint64(raw[xfsLogStart:])
	if start == 0 {
		return g, nil // the log is on another device
	}
	// The log's start is given as a group and a block in it.
	groupBlocks, bits := int64(be.Uint32(raw[xfsAGBlocks:])), raw[xfsAGBlkLog]
	logBlocks := int64(be.Uint32(raw[xfsLogBlocks:]))
	if bits > 31 || start>>bits >= uint64(be.Uint32(raw[xfsAGCount:])) {
		return nil, ErrNone
	}
	at := int64(start>>bits)*groupBlocks + int64(start&(1<<bits-1)) //nolint:gosec // at most 2^32 groups of 2^31 blocks
	if at <= 0 || at > g.blocks || logBlocks == 0 || logBlocks > g.blocks-at {
		return nil, ErrNone
	}
	g.logAt, g.logBlocks = at*(block/512), logBlocks*(block/512)
	return g, nil
}
