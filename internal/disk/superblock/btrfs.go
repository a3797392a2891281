package superblock

import (
	"encoding/binary"
	"io"
	"math"
)

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
	if string(raw[btrfsMagic:btrfsMagic+8]) != "_BHRfS_M" || total == 0 || total > math.MaxInt64 || le.Uint64(raw[btrfsDevices:]) != 1 {
		return nil, ErrNone
	}
	return &Super{Bytes: int64(total), Replay: le.Uint64(raw[btrfsLogRoot:]) != 0}, nil
}
