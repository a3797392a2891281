// Package confine starts programs that parse filesystems written by a tenant. If a crafted
// filesystem takes over such a program, it can harm only the device that it was given.
//
// There is no helper program: a separate thread gives up its rights, starts the program, and
// ends. Only the limits are set from outside, because they belong to a process, not to a thread.
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
	// Device is the only file that the program may open for writing. O_PATH is enough here.
	Device *os.File
	// Memory bounds its address space, in bytes, and CPU its processor time. 0 is for a program
	// that must not end half-way, such as resize2fs: it has neither bound.
	Memory uint64
	CPU    time.Duration
}

// Start starts cmd as cmd.Start does, confined:
//
//   - No capabilities and no new privileges. If root may not read and write the device's node as its
//     owner, the program keeps CAP_DAC_OVERRIDE, which it needs to open the node.
//   - Landlock, if the kernel has it, allows the device, and reading of programs, libraries,
//     /proc and /sys.
//   - A seccomp filter, if the kernel has it, denies sockets, signals, locks, and what else root can
//     do to others without a capability. What stays: it can start more processes, and set the times
//     of files.
//   - The number and size of files are limited. If b.Memory is set, memory and processor time
//     are too, and the kernel's OOM killer chooses the program first.
//
// The program stays uid 0, because root owns a device's node.
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
	// The program runs already: limits belong to a process, so this thread cannot set them before.
	if err := b.limit(cmd.Process.Pid); err != nil {
		return errors.Join(fmt.Errorf("it cannot be limited: %w", err), cmd.Process.Kill(), cmd.Wait())
	}
	return nil
}

// onThreadOfItsOwn calls do on a thread that ends afterwards. The main thread cannot be used: it
// represents the process in /proc, and does not end.
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

// enter gives up this thread's rights. The order matters: no_new_privs must be first, because the
// other steps need it without capabilities, and the filter last, because it denies some of them.
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
	const rw = unix.S_IRUSR | unix.S_IWUSR
	if int(st.Uid) != unix.Geteuid() || st.Mode&rw != rw {
		// With no_new_privs, exec as root adds no capability to the permitted ones.
		data[0].Permitted = 1 << unix.CAP_DAC_OVERRIDE
		data[0].Effective = data[0].Permitted
	}
	return unix.Capset(&header, &data[0])
}

const (
	// mostWritten bounds a file that is written to: a program's output. The kernel does not apply it to block devices.
	mostWritten = 1 << 20
	mostFiles   = 256
	// firstToGo is the largest oom_score_adj.
	firstToGo = 1000
)

// Memory is the limit for a filesystem of this many bytes. It is less than what systemd's unit allows, and up to 80 GiB
// enough for e2fsck with as many files as mkfs provides for. e2fsck fails if a larger filesystem needs more.
func Memory(size int64) uint64 {
	const least, most, share = 128 << 20, 768 << 20, 128
	return uint64(min(least+size/share, most)) //nolint:gosec // no size is negative
}

func (b Box) limit(pid int) error {
	limits := map[int]uint64{unix.RLIMIT_CORE: 0, unix.RLIMIT_FSIZE: mostWritten, unix.RLIMIT_NOFILE: mostFiles}
	if b.Memory > 0 {
		limits[unix.RLIMIT_AS], limits[unix.RLIMIT_CPU] = b.Memory, uint64(b.CPU/time.Second) //nolint:gosec // no bound is negative
	}
	for resource, most := range limits {
		if err := unix.Prlimit(pid, resource, &unix.Rlimit{Cur: most, Max: most}, nil); err != nil {
			return err
		}
	}
	if b.Memory == 0 {
		return nil
	}
	return os.WriteFile("/proc/"+strconv.Itoa(pid)+"/oom_score_adj", []byte(strconv.Itoa(firstToGo)), 0)
}
