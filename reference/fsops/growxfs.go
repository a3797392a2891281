package fsops

import (
	"fmt"
	"os"
)

// From the kernel's xfs_fs.h.
const (
	xfsIocGeometry = 0x8070587c // version 4, which every kernel has
	xfsIocGrowData = 0x4010586e
	// xfsLeastGroup is the smallest size, in blocks, of the last allocation group; a
	// smaller rest of the device stays unused.
	xfsLeastGroup = 64
)

type xfsGeometry struct {
	Block, RTExtent, GroupBlocks, Groups uint32
	LogBlocks, Sector, Inode, MostInodes uint32
	DataBlocks                           uint64
	_                                    [9]uint64
}

type xfsGrowData struct {
	Blocks     uint64
	MostInodes uint32
	_          uint32
}

func planXFS(dir *os.File, device int, bytes int64) (*plan, error) {
	if err := sameDevice(fdOf(dir), device); err != nil {
		return nil, err
	}
	var is xfsGeometry
	if _, err := ioctl(fdOf(dir), xfsIocGeometry, &is); err != nil {
		return nil, fmt.Errorf("ask xfs for its geometry: %w", err)
	}
	blocks := is.fill(bytes)
	return &plan{has: times(is.DataBlocks, uint64(is.Block)), most: times(blocks, uint64(is.Block)), grow: func() error {
		_, err := ioctl(fdOf(dir), xfsIocGrowData, &xfsGrowData{Blocks: blocks, MostInodes: is.MostInodes})
		return err
	}}, nil
}

// fill returns how many blocks a filesystem has that fills a device.
func (is *xfsGeometry) fill(device int64) uint64 {
	if is.Block == 0 || is.GroupBlocks == 0 {
		return 0
	}
	blocks := uint64(device) / uint64(is.Block) //nolint:gosec // no size is negative
	if rest := blocks % uint64(is.GroupBlocks); rest < xfsLeastGroup {
		return blocks - rest
	}
	return blocks
}
