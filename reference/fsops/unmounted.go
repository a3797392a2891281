package fsops

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/disk/confine"
	"github.com/crust-proxy/crust-proxy/internal/ground/capture"
)

// GrowUnmounted makes an ext4 that is not mounted fill its device. To grow a mounted ext4
// takes CAP_SYS_RESOURCE, which root in a container may lack. Other filesystems can only
// grow while they are mounted, and nothing is done.
//
// It needs e2fsck and resize2fs, which run confined. The end of ctx kills e2fsck, which can
// be run again, but never resize2fs, which has no limits of memory and time: a filesystem may be lost if its
// growth is interrupted.
// The path may be that of an open descriptor, /proc/PID/fd/N.
func GrowUnmounted(ctx context.Context, device, fsType string) error {
	if !strings.HasPrefix(fsType, "ext") {
		return nil
	}
	size, full, err := extFull(device)
	if err != nil {
		return fmt.Errorf("compare the filesystem of %s with its device: %w", device, err)
	}
	if full {
		return nil
	}
	file, err := os.OpenFile(device, unix.O_PATH, 0) //nolint:gosec // the caller names the device
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	box := confine.Box{Device: file, Memory: confine.Memory(size), CPU: mostCPU}
	check := exec.CommandContext(ctx, "e2fsck", "-f", "-p", childDevice)
	if err := runTool(check, box); err != nil && (check.ProcessState == nil || check.ProcessState.ExitCode() != extRepaired) {
		return fmt.Errorf("check the filesystem of %s before it grows: %w", device, err)
	}
	if err := runTool(exec.Command("resize2fs", childDevice), confine.Box{Device: file}); err != nil {
		return fmt.Errorf("grow the filesystem of %s: %w", device, err)
	}
	return nil
}

const (
	// childDevice is the device as a program has it.
	childDevice = "/proc/self/fd/3"
	mostCPU     = 10 * time.Minute
	// mostOutput bounds the captured output of a program.
	mostOutput = 16 << 10
)

// runTool runs a program so that it survives this process: it has its own session, and
// writes to memory and not to a pipe.
func runTool(cmd *exec.Cmd, box confine.Box) error {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.ExtraFiles = []*os.File{box.Device}
	out, err := capture.Run(cmd, box.Start, mostOutput, mostOutput)
	if err == nil && !cmd.ProcessState.Success() {
		err = fmt.Errorf("%s: %s%s", cmd.ProcessState, out.Stdout, out.Stderr)
	}
	return err
}

// extRepaired is the exit status of e2fsck after it has repaired all errors.
const extRepaired = 1

// extFull returns the size of a device, and whether there is nothing to grow: the filesystem
// fills the device, or there is no filesystem.
func extFull(device string) (size int64, full bool, err error) {
	file, err := os.Open(device) //nolint:gosec // the caller names the device
	if err != nil {
		return 0, false, err
	}
	defer func() { _ = file.Close() }()
	super, err := readExt(file)
	if err != nil {
		return 0, false, fmt.Errorf("read its superblock: %w", err)
	}
	size, err = file.Seek(0, 2)
	return size, super == nil || super.blocks >= super.fill(size), err
}
