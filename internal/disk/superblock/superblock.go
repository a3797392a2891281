// Package superblock reads what a filesystem says about itself from its device, without mounting it. A sandbox writes
// that device, so every byte is the input of an attacker: only fixed offsets are read, lengths and ranges are checked,
// and text is cut to printable ASCII.
//
// A filesystem may be mounted elsewhere while it is read. What is read is therefore only
// what has reached the device by then.
package superblock

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
	"syscall"
	"time"
	"unsafe"
)

// ErrNone is the error for a device without a readable superblock of the filesystem that was asked for.
var ErrNone = errors.New("there is no readable superblock of it")

// ErrDamaged is an ErrNone where the filesystem's magic is there: it is damaged, torn, or of a form that is not known here.
var ErrDamaged = fmt.Errorf("it is damaged, or of an unknown form: %w", ErrNone)

// Super is the contents of a superblock.
type Super struct {
	// Bytes is the filesystem's size as statfs returns it if Exact is set, and an upper bound of that otherwise.
	Bytes int64
	Exact bool
	// Inodes is the number of inodes of a filesystem that has a fixed number, and 0 if it has none or it is not known.
	Inodes int64
	// Errors are the errors that the filesystem has on record; nil means none, or a
	// filesystem that keeps no such record.
	Errors *Errors
	// Clean is the state of an ext2, ext3 or ext4: valid, and without errors.
	Clean bool
	// Replay is set if the journal or log must be replayed before the filesystem can be
	// used: it was not unmounted cleanly, or is mounted now.
	Replay bool
	// UUID is that of an ext2, ext3 or ext4, and "" for others.
	UUID string
	// Root is nil if the root directory was not found, and for btrfs.
	Root *Root
	// log is what Bytes leaves out of an xfs. rest is what a group may have that is left out behind the last one: it is too
	// small. If the last one is not whole, nothing is.
	log, rest int64
}

// Errors are the errors that a filesystem keeps on record until it is checked.
type Errors struct {
	// Count is 0 if only the filesystem's state shows that there were errors.
	Count       uint32
	First, Last Error
}

// Error is one error on record. Its zero value is one that was not recorded.
type Error struct {
	Time time.Time
	// Function of the kernel that found it: printable, or "".
	Function string
}

// Read reads the superblock of a filesystem of fsType. It makes at most three reads, each of whole sectors, so that
// device may be open with O_DIRECT; only a log of xfs is not looked at here (see XFSLogDirty).
func Read(device io.ReaderAt, fsType string) (*Super, error) {
	switch fsType {
	case "ext2", "ext3", "ext4":
		return readExt(device)
	case "xfs":
		return readXFS(device)
	case "btrfs":
		return readBtrfs(device)
	}
	return nil, fmt.Errorf("%q: %w", fsType, ErrNone)
}

// Is reports whether statfs with these totals can be of this filesystem.
func (s *Super) Is(bytes, inodes int64) bool {
	if s.Inodes > 0 && inodes != s.Inodes {
		return false
	}
	if s.Exact {
		return bytes == s.Bytes
	}
	// statfs leaves out what an ext4 uses itself (journal, inode tables), which is never more than half.
	return bytes <= s.Bytes && bytes >= s.Bytes/2
}

// Fills reports whether the filesystem is as large as its device, whose size is given.
func (s *Super) Fills(device int64) bool {
	const page = 64 << 10 // the largest one: all may leave out parts of it
	left := device - s.Bytes - s.log
	return left >= 0 && left < max(s.rest, page)
}

// Words describes the errors to a person; "" means none.
func (e *Errors) Words() string {
	if e == nil {
		return ""
	}
	text := "the filesystem has errors on record"
	if !e.First.Time.IsZero() {
		text += " since " + e.First.Time.UTC().Format(time.RFC3339)
	}
	if e.Count > 0 {
		text += fmt.Sprintf(" (%d", e.Count)
		if e.Last.Function != "" {
			text += ", the last one of " + e.Last.Function
		}
		if !e.Last.Time.IsZero() {
			text += " at " + e.Last.Time.UTC().Format(time.RFC3339)
		}
		text += ")"
	}
	return text + ": run e2fsck while no pod has the volume"
}

const (
	pageSize      = 4096
	largestSector = 64 << 10 // BLK_MAX_BLOCK_SIZE of the kernel's <linux/blkdev.h>
)

// page reads the aligned 4 KiB that begin at start. A device may be shorter, as long as it holds need bytes of them.
func page(device io.ReaderAt, start int64, need int) ([]byte, error) {
	raw := Aligned(pageSize)
	n, err := device.ReadAt(raw, start)
	if errors.Is(err, syscall.EINVAL) { // it is open with O_DIRECT, and has larger sectors
		raw = Aligned(largestSector)
		skip := start % largestSector
		n, err = device.ReadAt(raw, start-skip)
		raw, n = raw[skip:], n-int(skip)
	}
	if n >= need {
		return raw[:n], nil
	}
	if err == nil || errors.Is(err, io.EOF) {
		err = ErrNone
	}
	return nil, err
}

// Aligned is memory of n bytes that begins at a multiple of 4 KiB, as O_DIRECT needs it.
func Aligned(n int64) []byte {
	raw := make([]byte, n+pageSize)
	skip := (pageSize - int64(uintptr(unsafe.Pointer(&raw[0]))%pageSize)) % pageSize //nolint:gosec // only the address is used
	return raw[skip : skip+n : skip+n]
}

// Where a btrfs superblock has what is read of it.
const (
	btrfsStart   = 64 << 10
	btrfsMagic   = 64
	btrfsLogRoot = 96
	btrfsTotal   = 112
	btrfsDevices = 136
	btrfsSize    = 4096
)

// readBtrfs returns no exact size: statfs divides by the number of copies in the data
// profile, which is not in the superblock.
func readBtrfs(device io.ReaderAt) (*Super, error) {
	raw, err := page(device, btrfsStart, btrfsSize)
	if err != nil {
		return nil, err
	}
	le := binary.LittleEndian
	total := le.Uint64(raw[btrfsTotal:])
	switch {
	case string(raw[btrfsMagic:btrfsMagic+8]) != "_BHRfS_M":
		return nil, ErrNone
	case total == 0 || total > math.MaxInt64 || le.Uint64(raw[btrfsDevices:]) != 1:
		return nil, ErrDamaged
	}
	return &Super{Bytes: int64(total), Replay: le.Uint64(raw[btrfsLogRoot:]) != 0}, nil
}

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
