package fsops

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
)

// Where a btrfs superblock has what is needed of it.
const (
	btrfsStart      = 64 << 10
	btrfsMagicAt    = 0x40
	btrfsDevicesAt  = 0x88
	btrfsMagic      = "_BHRfS_M"
	extCompat       = 0x5c
	extJournalDev   = 0xe4
	extHasJournal   = 0x4
	superblockBytes = 1024
)

// OneDevice makes sure that a filesystem names no device but its own, given that one
// before anybody mounts it. An ext4 can say that its journal is on another device, and
// a btrfs that it has several: the kernel then writes to those as well. An xfs does not
// name them; without the mount option for it, the kernel refuses the mount.
func OneDevice(device int, fsType string) error {
	return oneDevice(fdReader(device), fsType)
}

func oneDevice(device io.ReaderAt, fsType string) error {
	raw := make([]byte, superblockBytes)
	switch {
	case strings.HasPrefix(fsType, "ext"):
		if _, err := device.ReadAt(raw, extStart); err != nil {
			return fmt.Errorf("read the superblock: %w", err)
		}
		le := binary.LittleEndian
		if le.Uint32(raw[extCompat:])&extHasJournal != 0 && le.Uint32(raw[extJournalDev:]) != 0 {
			return errors.New("the filesystem has its journal on another device, and a deferred volume has only one: " +
				"give it an internal journal (tune2fs -O ^has_journal, then tune2fs -j)")
		}
	case fsType == "btrfs":
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
