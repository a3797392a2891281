package fsops

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"

	"github.com/crust-proxy/crust-proxy/internal/capture"
)

// GrowUnmounted makes a filesystem that is mounted nowhere fill its device. That is
// the way of ext4: once it is mounted, growing takes CAP_SYS_RESOURCE, which root in
// a container may not have. The others grow mounted only, and nothing is done.
//
// It needs e2fsck and resize2fs. The end of ctx ends the first, which mends the rest the
// next time. The second is never ended: a filesystem whose growth was cut off may be
// lost. The path may be that of an open descriptor, /proc/PID/fd/N.
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
	check := exec.CommandContext(ctx, "e2fsck", "-f", "-p", device) //nolint:gosec // no shell; the caller names the device
	if err := runTool(check); err != nil && check.ProcessState.ExitCode() != extRepaired {
		return fmt.Errorf("check the filesystem of %s before it grows: %w", device, err)
	}
	if err := runTool(exec.Command("resize2fs", device)); err != nil { //nolint:gosec // no shell; the caller names the device
		return fmt.Errorf("grow the filesystem of %s: %w", device, err)
	}
	return nil
}

// mostOutput bounds what is kept of a program's output.
const mostOutput = 16 << 10

// runTool runs a program that can outlive this process: it has a session of its own, and
// writes to memory, not to a pipe.
func runTool(cmd *exec.Cmd) error {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	out, err := capture.Run(cmd, mostOutput, mostOutput)
	if err == nil && !cmd.ProcessState.Success() {
		err = fmt.Errorf("%s: %s%s", cmd.ProcessState, out.Stdout, out.Stderr)
	}
	return err
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
