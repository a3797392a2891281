package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	kvmDevice = "/dev/kvm"
	// probeTimeout bounds the smallest guest, which needs milliseconds.
	probeTimeout = 3 * time.Second
)

// ProbeKVM runs a guest with KVM and returns why it does not work, or nil. To open the device is
// no proof: with nested virtualization the guest may hang.
func ProbeKVM(program string, user uint32) error {
	if _, err := os.Stat(kvmDevice); err != nil {
		return err
	}
	return probe(program, user, true)
}

// probe runs a guest that is a ROM of 64 KiB. Its code at the reset vector ends the machine with a status.
func probe(program string, user uint32, kvm bool) error {
	const (
		romSize, resetVector = 64 << 10, 64<<10 - 16
		status, exit         = 0x10, 0x10<<1 | 1 // the exit status that isa-debug-exit makes of it
	)
	rom := make([]byte, romSize)
	copy(rom[resetVector:], []byte{
		0xba, 0x01, 0x05, // mov dx, 0x501
		0xb0, status, // mov al, status
		0xee, // out dx, al
		0xf4, // hlt
	})
	fd, err := unix.MemfdCreate("rom", unix.MFD_CLOEXEC)
	if err != nil {
		return err
	}
	file := os.NewFile(uintptr(fd), "rom")
	defer func() { _ = file.Close() }()
	if _, err := file.Write(rom); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), probeTimeout)
	defer cancel()
	args := append(baseArgs(kvm), "-machine", "pc", "-m", "16M", "-bios", "/proc/self/fd/3",
		"-device", "isa-debug-exit,iobase=0x501,iosize=2")
	cmd := exec.CommandContext(ctx, program, args...) //nolint:gosec // by our own configuration
	cmd.ExtraFiles = []*os.File{file}
	cmd.SysProcAttr = isolated(user, kvm)
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL // at the end of this thread
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	out, err := cmd.CombinedOutput()
	if ctx.Err() != nil {
		return fmt.Errorf("the smallest guest did not end within %v: %w", probeTimeout, ctx.Err())
	}
	if ended, is := errors.AsType[*exec.ExitError](err); is && ended.ExitCode() == exit {
		return nil
	}
	return fmt.Errorf("the smallest guest did not run: %w: %.300q", err, out)
}
