package fsops

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
)

// Where the btrfs superblock is, and offsets in it.
const (
	btrfsStart     = 64 << 10
	btrfsMagicAt   = 0x40
	btrfsDevicesAt = 0x88
	btrfsMagic     = "_BHRfS_M"
)

// OneDevice checks, before a filesystem is mounted, that its superblock names no other
// device. The journal of an ext4 can be on another device, and a btrfs can have several:
// the kernel then writes to those as well. An xfs does not name other devices; the kernel
// refuses to mount one that needs them, unless a mount option names them.
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
