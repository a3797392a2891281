package superblock

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// Where an ext2, ext3 or ext4 superblock has what is read of it (the kernel's struct ext4_super_block).
const (
	extStart = 1024
	extSize  = 1024

	extInodes      = 0x00
	extBlocks      = 0x04
	extLogBlock    = 0x18
	extGroupBlocks = 0x20
	extGroupInodes = 0x28
	extMagic       = 0x38
	extState       = 0x3a
	extIncompat    = 0x60
	extROCompat    = 0x64
	extUUID        = 0x68
	extReservedGDT = 0xce
	extBlocksTop   = 0x150
	extErrorCount  = 0x194
	extFirstError  = 0x198
	extFirstFunc   = 0x1a8
	extLastError   = 0x1cc
	extLastFunc    = 0x1e0
	extFirstTop    = 0x278
	extLastTop     = 0x279
	extChecksum    = 0x3fc
	extFuncLength  = 32
	extMostLogSize = 6 // 64 KiB

	extValidState   = 0x1
	extErrorState   = 0x2
	extRecover      = 0x4
	ext64Bit        = 0x80
	extMetadataCsum = 0x400
)

func readExt(device io.ReaderAt) (*Super, error) {
	raw, err := page(device, 0, extStart+extSize)
	if err != nil {
		return nil, err
	}
	raw = raw[extStart : extStart+extSize]
	le := binary.LittleEndian
	torn := le.Uint32(raw[extROCompat:])&extMetadataCsum != 0 && // while the guest writes it, or damaged
		^crc32.Checksum(raw[:extChecksum], crc32.MakeTable(crc32.Castagnoli)) != le.Uint32(raw[extChecksum:])
	blocks := uint64(le.Uint32(raw[extBlocks:]))
	if le.Uint32(raw[extIncompat:])&ext64Bit != 0 {
		blocks |= uint64(le.Uint32(raw[extBlocksTop:])) << 32
	}
	size := uint64(1024) << le.Uint32(raw[extLogBlock:])
	switch {
	case le.Uint16(raw[extMagic:]) != 0xef53:
		return nil, ErrNone
	case torn || le.Uint32(raw[extLogBlock:]) > extMostLogSize || blocks == 0 || blocks > math.MaxInt64/size:
		return nil, ErrDamaged
	}
	id := raw[extUUID:]
	return &Super{
		Bytes:  int64(blocks * size), //nolint:gosec // bounded above
		Inodes: int64(le.Uint32(raw[extInodes:])),
		Errors: extErrors(raw),
		Clean:  le.Uint16(raw[extState:])&(extValidState|extErrorState) == extValidState,
		Replay: le.Uint32(raw[extIncompat:])&extRecover != 0,
		UUID:   fmt.Sprintf("%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:16]),
		Root:   extRoot(device, raw, size, blocks),
		rest:   extRest(raw, int64(size), int64(blocks)), //nolint:gosec // bounded above
	}, nil
}

// extRest is about what e2fsprogs require of a last group: its tables and 50 blocks.
func extRest(raw []byte, size, blocks int64) int64 {
	le := binary.LittleEndian
	group := int64(le.Uint32(raw[extGroupBlocks:]))
	if group == 0 || (blocks-int64(le.Uint32(raw[extFirstBlock:])))%group != 0 {
		return 0
	}
	inodes := int64(le.Uint32(raw[extGroupInodes:])) * int64(le.Uint16(raw[extInodeSize:])) / size
	return size * min(group, inodes+blocks/group*64/size+int64(le.Uint16(raw[extReservedGDT:]))+5+50)
}

func extErrors(raw []byte) *Errors {
	le := binary.LittleEndian
	count := le.Uint32(raw[extErrorCount:])
	if count == 0 && le.Uint16(raw[extState:])&extErrorState == 0 {
		return nil
	}
	return &Errors{
		Count: count,
		First: Error{extTime(raw, extFirstError, extFirstTop), printable(raw[extFirstFunc : extFirstFunc+extFuncLength])},
		Last:  Error{extTime(raw, extLastError, extLastTop), printable(raw[extLastFunc : extLastFunc+extFuncLength])},
	}
}

func extTime(raw []byte, low, top int) time.Time {
	seconds := int64(binary.LittleEndian.Uint32(raw[low:])) | int64(raw[top])<<32
	if seconds == 0 {
		return time.Time{}
	}
	return time.Unix(seconds, 0) // 40 bits: a year with five digits at most
}

var functionForm = sys.LazyRegexp(`^[0-9A-Za-z_]*$`)

// printable returns the name of a kernel function in a C string, or "" if that has other characters than such a name.
func printable(raw []byte) string {
	name, _, _ := bytes.Cut(raw, []byte{0})
	return string(functionForm().Find(name))
}
