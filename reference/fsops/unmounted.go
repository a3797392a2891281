package fsops

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
)

// GrowUnmounted makes a filesystem that is mounted nowhere fill its device. That is
// the way of ext4: once it is mounted, growing takes CAP_SYS_RESOURCE, which root in
// a container may not have. The others grow mounted only, and nothing is done.
//
// It needs e2fsck and resize2fs. A cut-off one leaves what e2fsck mends the next
// time. The path may be that of an open descriptor, /proc/PID/fd/N.
func GrowUnmounted(ctx context.Context, device, fsType string) error {
	if !strings.HasPrefix(fsType, "ext") {
		return nil
	}
	full, err := extFull(device)
	if err != nil {
		return fmt.Errorf("compare the filesystem of %s with its device: %w", device, err)
	}
	if full {
		return nil
	}
	out, err := exec.CommandContext(ctx, "e2fsck", "-f", "-p", device).CombinedOutput() //nolint:gosec // no shell; the caller names the device
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == extRepaired {
		err = nil
	}
	if err != nil {
		return fmt.Errorf("check the filesystem of %s before it grows: %w: %s", device, err, out)
	}
	if out, err := exec.CommandContext(ctx, "resize2fs", device).CombinedOutput(); err != nil { //nolint:gosec // no shell; the caller names the device
		return fmt.Errorf("grow the filesystem of %s: %w: %s", device, err, out)
	}
	return nil
}

// extRepaired is how e2fsck ends when all that it found is repaired.
const extRepaired = 1

// extFull tells that there is nothing to grow: the filesystem fills its device, or
// there is none.
func extFull(device string) (bool, error) {
	file, err := os.Open(device) //nolint:gosec // the caller names the device
	if err != nil {
		return false, err
	}
	defer func() { _ = file.Close() }()
	super, err := readExt(file)
	if err != nil {
		return false, fmt.Errorf("read its superblock: %w", err)
	}
	bytes, err := file.Seek(0, 2)
	return super == nil || super.blocks >= super.fill(bytes), err
}
