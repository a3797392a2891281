// Package confine starts programs that parse what a tenant wrote, so that a program which
// is taken over by a crafted filesystem can harm only the device that it was given.
//
// It is done without a helper program: a thread of its own gives up what the program is
// not to have, starts it, and ends. Only limits are set from outside, since they belong to
// a process and not to a thread.
package confine

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// Box is what a program may have.
type Box struct {
	// Device is open, with O_PATH at least: the only file that it may open for writing.
	Device *os.File
	// Memory bounds its address space, in bytes.
	Memory uint64
	// CPU bounds its processor time.
	CPU time.Duration
}

// Start starts cmd as cmd.Start does, confined:
//
//   - no capabilities and no new privileges. If the device's node is not root's own,
//     CAP_DAC_OVERRIDE stays, which opening it takes.
//   - by Landlock, where the kernel has it, no file but programs, libraries, /proc and /sys
//     for reading, and the device.
//   - by a seccomp filter, where the kernel has it, no sockets, no signals, and nothing else
//     that root can do to others without a capability.
//   - limits of memory, processor time, files and their size. The kernel's OOM killer takes
//     it first.
//
// It stays uid 0: a device's node is root's.
func (b Box) Start(cmd *exec.Cmd) error {
	err := onThreadOfItsOwn(func() error {
		if err := b.enter(filepath.Dir(cmd.Path)); err != nil {
			return fmt.Errorf("it cannot be confined: %w", err)
		}
		return cmd.Start()
	})
	if err != nil {
		return err
	}
	// It runs already. What counts is the sum, which it cannot have reached by now.
	if err := b.limit(cmd.Process.Pid); err != nil {
		return errors.Join(fmt.Errorf("it cannot be limited: %w", err), cmd.Process.Kill(), cmd.Wait())
	}
	return nil
}

// onThreadOfItsOwn calls do on a thread that ends with it. It is not the main thread: that
// one stands for the process in /proc, and does not end.
func onThreadOfItsOwn(do func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: so the thread ends with the goroutine
		if unix.Gettid() == unix.Getpid() {
			done <- onThreadOfItsOwn(do)
			runtime.UnlockOSThread()
			return
		}
		done <- do()
	}()
	return <-done
}

// enter gives up this thread's rights. The order matters: no_new_privs allows the other
// steps to whoever has no capability, and the filter forbids some of them.
func (b Box) enter(programs string) error {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("no_new_privs: %w", err)
	}
	if err := restrictFiles(b.Device, programs); err != nil {
		return fmt.Errorf("landlock: %w", err)
	}
	if err := dropCapabilities(b.Device); err != nil {
		return fmt.Errorf("capabilities: %w", err)
	}
	if err := filterCalls(); err != nil {
		return fmt.Errorf("seccomp: %w", err)
	}
	return nil
}

func dropCapabilities(device *os.File) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(device.Fd()), &st); err != nil {
		return err
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if int(st.Uid) != unix.Geteuid() {
		// With no_new_privs an exec as root gives what was permitted before, and no more.
		data[0].Permitted = 1 << unix.CAP_DAC_OVERRIDE
		data[0].Effective = data[0].Permitted
	}
	return unix.Capset(&header, &data[0])
}

const (
	// mostWritten bounds a file that is written to: a program's output. The kernel does
	// not apply it to block devices.
	mostWritten = 1 << 20
	mostFiles   = 256
	// firstToGo is the largest oom_score_adj.
	firstToGo = 1000
)

// Memory is what e2fsck, the hungriest of the programs, takes for a filesystem of this many
// bytes with as many files as mkfs provides for, and less than what systemd's unit leaves.
func Memory(size int64) uint64 {
	const least, most, share = 128 << 20, 768 << 20, 128
	return uint64(min(least+size/share, most)) //nolint:gosec // no size is negative
}

func (b Box) limit(pid int) error {
	for resource, most := range map[int]uint64{
		unix.RLIMIT_AS:     b.Memory,
		unix.RLIMIT_CPU:    uint64(b.CPU / time.Second), //nolint:gosec // no bound is negative
		unix.RLIMIT_CORE:   0,
		unix.RLIMIT_FSIZE:  mostWritten,
		unix.RLIMIT_NOFILE: mostFiles,
	} {
		if err := unix.Prlimit(pid, resource, &unix.Rlimit{Cur: most, Max: most}, nil); err != nil {
			return err
		}
	}
	return os.WriteFile("/proc/"+strconv.Itoa(pid)+"/oom_score_adj", []byte(strconv.Itoa(firstToGo)), 0)
}
