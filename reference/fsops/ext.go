package fsops

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Offsets in an ext superblock.
const (
	extStart       = 1024
	extBlocks      = 0x04
	extFirstBlock  = 0x14
	extLogBlock    = 0x18
	extGroupBlocks = 0x20
	extGroupInodes = 0x28
	extMagic       = 0x38
	extInodeSize   = 0x58
	extCompat      = 0x5c
	extFeatures    = 0x60
	extROFeatures  = 0x64
	extReservedGDT = 0xce
	extJournalIno  = 0xe0
	extJournalDev  = 0xe4
	extDescSize    = 0xfe
	extBlocksTop   = 0x150

	extHasJournal  = 0x4
	ext64Bit       = 0x80
	extSparseSuper = 0x1
)

type extSuper struct {
	blocks, block, first    int64 // block is the size of one
	groupBlocks, inodeTable int64
	reserved, descSize      int64
	sparse                  bool
	journalElsewhere        bool // on a device of its own
}

// readExt reads the superblock. It returns nil if there is none.
func readExt(device io.ReaderAt) (*extSuper, error) {
	raw := make([]byte, 1024)
	if _, err := device.ReadAt(raw, extStart); err != nil {
		return nil, err
	}
	le := binary.LittleEndian
	u32 := func(at int) int64 { return int64(le.Uint32(raw[at:])) }
	u16 := func(at int) int64 { return int64(le.Uint16(raw[at:])) }
	if u16(extMagic) != unix.EXT4_SUPER_MAGIC || u32(extLogBlock) > 6 || u32(extGroupBlocks) == 0 {
		return nil, nil
	}
	s := &extSuper{
		blocks: u32(extBlocks), block: 1024 << u32(extLogBlock), first: u32(extFirstBlock),
		groupBlocks: u32(extGroupBlocks), reserved: u16(extReservedGDT), descSize: 32,
		sparse: u32(extROFeatures)&extSparseSuper != 0,
		// A journal without an inode is on a device that the superblock can also name
		// among its default mount options, as journal_dev=.
		journalElsewhere: u32(extCompat)&extHasJournal != 0 && (u32(extJournalDev) != 0 || u32(extJournalIno) == 0),
	}
	s.inodeTable = (u32(extGroupInodes)*cmp.Or(u16(extInodeSize), 128) + s.block - 1) / s.block
	if u32(extFeatures)&ext64Bit != 0 {
		s.blocks |= u32(extBlocksTop) << 32
		s.descSize = max(u16(extDescSize), 64)
	}
	return s, nil
}

// extSpare is how many usable blocks e2fsprogs requires in the last group.
const extSpare = 50

// fill returns how many blocks a filesystem has that fills a device. As e2fsprogs do, it
// leaves out parts of a page, and a last group that is too small for its own tables.
func (s *extSuper) fill(device int64) int64 {
	unit := max(s.block, int64(os.Getpagesize()))
	blocks := device / unit * (unit / s.block)
	rest := (blocks - s.first) % s.groupBlocks
	groups := (blocks-s.first)/s.groupBlocks + 1
	if rest <= 0 || groups == 1 {
		return blocks
	}
	tables := 2 + s.inodeTable
	if !s.sparse || hasSuper(groups-1) {
		tables += 1 + (groups*s.descSize+s.block-1)/s.block + s.reserved
	}
	if rest < tables+extSpare {
		return blocks - rest
	}
	return blocks
}

// hasSuper reports whether a group of a sparse filesystem has a copy of the superblock.
func hasSuper(group int64) bool {
	return group <= 1 || slices.ContainsFunc([]int64{3, 5, 7}, func(base int64) bool {
		power := base
		for power <= group/base {
			power *= base
		}
		return power == group
	})
}

// Where the btrfs superblock is, and offsets in it.
const (
	btrfsStart     = 64 << 10
	btrfsMagicAt   = 0x40
	btrfsDevicesAt = 0x88
	btrfsMagic     = "_BHRfS_M"
)

// OneDevice checks, before a filesystem is mounted, that its superblock names no other device. The journal of an ext4
// can be on another device, and a btrfs can have several: the kernel then writes to those as well. An xfs does not name
// other devices; the kernel refuses to mount one that needs them, unless a mount option names them.
func OneDevice(device int, fsType string) error {
	return oneDevice(fdReader(device), fsType)
}

func oneDevice(device io.ReaderAt, fsType string) error {
	switch {
	case strings.HasPrefix(fsType, "ext"):
		super, err := readExt(device)
		if err != nil {
			return fmt.Errorf("read the superblock: %w", err)
		}
		if super != nil && super.journalElsewhere {
			return errors.New("the filesystem has its journal on another device, and a deferred volume has only one: " +
				"give it an internal journal (tune2fs -O ^has_journal, then tune2fs -j)")
		}
	case fsType == "btrfs":
		raw := make([]byte, btrfsDevicesAt+8)
		if _, err := device.ReadAt(raw, btrfsStart); err != nil {
			return fmt.Errorf("read the superblock: %w", err)
		}
		count := binary.LittleEndian.Uint64(raw[btrfsDevicesAt:])
		if string(raw[btrfsMagicAt:btrfsMagicAt+len(btrfsMagic)]) == btrfsMagic && count > 1 {
			return fmt.Errorf("the filesystem has %d devices, and a deferred volume has only one: remove the others "+
				"(btrfs device remove) where it was made", count)
		}
	}
	return nil
}
