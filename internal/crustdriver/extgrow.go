package crustdriver

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"

	"github.com/crust-proxy/crust-proxy/internal/loopdev"
)

// growExt lets an ext4 that is not mounted grow to its device. Once it is mounted
// that takes CAP_SYS_RESOURCE, which root in a container may not have; before, it
// takes none.
func (d *Driver) growExt(ctx context.Context, id, device string) error {
	size, block, err := extSize(device)
	if err != nil {
		return fmt.Errorf("volume %q: read its superblock: %w", id, err)
	}
	has, err := loopdev.Size(device)
	if err != nil {
		return err
	}
	if size == 0 || size > has-block {
		return nil
	}
	// A cut off command leaves a filesystem that e2fsck repairs the next time.
	out, err := exec.CommandContext(ctx, "e2fsck", "-f", "-p", device).CombinedOutput() //nolint:gosec // a device of ours
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == extRepaired {
		err = nil
	}
	if err != nil {
		return fmt.Errorf("volume %q: check its filesystem before it grows: %w: %s", id, err, out)
	}
	if out, err := exec.CommandContext(ctx, "resize2fs", device).CombinedOutput(); err != nil { //nolint:gosec // a device of ours
		return fmt.Errorf("volume %q: grow its filesystem: %w: %s", id, err, out)
	}
	return nil
}

// extRepaired is how e2fsck ends when all that it found is repaired.
const extRepaired = 1

// Where an ext superblock has what is needed of it.
const (
	extStart     = 1024
	extBlocks    = 0x04
	extLogBlock  = 0x18
	extMagic     = 0x38
	extFeatures  = 0x60
	extBlocksTop = 0x150
	ext64Bit     = 0x80
)

// extSize reads the size of an ext filesystem and of its blocks; 0 where there is
// none.
func extSize(device string) (size, block int64, err error) {
	file, err := os.Open(device) //nolint:gosec // a device of ours
	if err != nil {
		return 0, 0, err
	}
	defer func() { _ = file.Close() }()
	raw := make([]byte, 1024)
	if _, err := file.ReadAt(raw, extStart); err != nil {
		return 0, 0, err
	}
	le := binary.LittleEndian
	logBlock := le.Uint32(raw[extLogBlock:])
	if le.Uint16(raw[extMagic:]) != 0xef53 || logBlock > 6 {
		return 0, 0, nil
	}
	blocks := uint64(le.Uint32(raw[extBlocks:]))
	if le.Uint32(raw[extFeatures:])&ext64Bit != 0 {
		blocks |= uint64(le.Uint32(raw[extBlocksTop:])) << 32
	}
	block = 1024 << logBlock
	return int64(blocks) * block, block, nil //nolint:gosec // no ext4 has 2^63 bytes
}
