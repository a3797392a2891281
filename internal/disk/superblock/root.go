package superblock

import (
	"encoding/binary"
	"io"
	"math"
	"strconv"
)

// Root is the root directory of a filesystem, as it is on the device.
type Root struct {
	Group uint32
	Mode  uint16
}

// WritableFor reports whether members of a group, given in decimal, can write to the directory.
func (r *Root) WritableFor(group string) bool {
	const byGroup, byAll = 0o020, 0o002
	gid, err := strconv.ParseUint(group, 10, 32)
	return r.Mode&byAll != 0 || err == nil && uint64(r.Group) == gid && r.Mode&byGroup != 0
}

const (
	directory = 0o040000
	typeBits  = 0o170000
)

// Where ext4 has its root directory's inode: the second one of the first group.
const (
	extFirstBlock = 0x14
	extInodeSize  = 0x58
	extTable      = 0x8
	extTableTop   = 0x28
	extDescriptor = 64
	extGroup      = 0x18
	extGroupTop   = 0x7a
	extInodeUsed  = 128
)

// extRoot returns nil if the inode cannot be found. readExt has checked super.
func extRoot(device io.ReaderAt, super []byte, size, blocks uint64) *Root {
	le := binary.LittleEndian
	desc := slot(device, (uint64(le.Uint32(super[extFirstBlock:]))+1)*size, extDescriptor)
	inode := uint64(le.Uint16(super[extInodeSize:]))
	if desc == nil || inode < extInodeUsed || inode > size || inode&(inode-1) != 0 {
		return nil
	}
	table := uint64(le.Uint32(desc[extTable:]))
	if le.Uint32(super[extIncompat:])&ext64Bit != 0 {
		table |= uint64(le.Uint32(desc[extTableTop:])) << 32
	}
	if table == 0 || table >= blocks {
		return nil
	}
	raw := slot(device, table*size+inode, extInodeUsed)
	if raw == nil || le.Uint16(raw)&typeBits != directory {
		return nil
	}
	return &Root{Group: uint32(le.Uint16(raw[extGroup:])) | uint32(le.Uint16(raw[extGroupTop:]))<<16, Mode: le.Uint16(raw)}
}

// Where xfs has its root directory's inode: its number holds the group, the block in it, and the inode in that.
const (
	xfsRootInode = 56
	xfsInodeSize = 104
	xfsPerBlock  = 123
	xfsInodeUsed = 96
	xfsMode      = 2
	xfsGroup     = 12
)

func xfsRoot(device io.ReaderAt, g *xfsGeometry) *Root {
	be, super := binary.BigEndian, g.raw
	number, inode := be.Uint64(super[xfsRootInode:]), uint64(be.Uint16(super[xfsInodeSize:]))
	inBlock, inGroup := super[xfsPerBlock], super[xfsAGBlkLog]
	if inBlock > 8 || inGroup > 31 || inode < 256 || inode > 2048 || inode&(inode-1) != 0 {
		return nil
	}
	group, block := number>>(inBlock+inGroup), number>>inBlock&(1<<inGroup-1)
	if group >= uint64(be.Uint32(super[xfsAGCount:])) {
		return nil
	}
	at := group*uint64(be.Uint32(super[xfsAGBlocks:])) + block
	if at >= uint64(g.blocks) { //nolint:gosec // checked to be positive
		return nil
	}
	raw := slot(device, at*uint64(g.block)+number&(1<<inBlock-1)*inode, xfsInodeUsed) //nolint:gosec // as above
	if raw == nil || string(raw[:2]) != "IN" || be.Uint16(raw[xfsMode:])&typeBits != directory {
		return nil
	}
	return &Root{Group: be.Uint32(raw[xfsGroup:]), Mode: be.Uint16(raw[xfsMode:])}
}

// slot reads length bytes at a place, or returns nil. They must not cross a page.
func slot(device io.ReaderAt, at uint64, length int) []byte {
	if at > math.MaxInt64-pageSize {
		return nil
	}
	in := int(at % pageSize)
	raw, err := page(device, int64(at)-int64(in), in+length)
	if err != nil || len(raw) < in+length {
		return nil
	}
	return raw[in : in+length]
}
