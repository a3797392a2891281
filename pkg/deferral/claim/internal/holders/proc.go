package holders

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// direntHeader is the length of linux_dirent64 up to its name.
const direntHeader = 19

// eachEntry calls see for every entry of a directory, with a descriptor of it.
func eachEntry(path string, see func(dir int, name string, inode uint64)) error {
	dir, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(dir) }()
	buf := make([]byte, 8<<10)
	for {
		n, err := unix.Getdents(dir, buf)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || n <= 0 {
			return err
		}
		for rest := buf[:n]; len(rest) >= direntHeader; {
			size := binary.NativeEndian.Uint16(rest[16:])
			see(dir, unix.ByteSliceToString(rest[direntHeader:size]), binary.NativeEndian.Uint64(rest))
			rest = rest[size:]
		}
	}
}

// isGone reports whether a process or descriptor ended meanwhile. ESTALE is that of a file
// which its server has removed, and so of no device.
func isGone(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH) || errors.Is(err, unix.ESTALE)
}

// programOf returns the name of a process's executable file, which a process cannot choose as
// freely as its title.
func programOf(dir string) string {
	if exe, err := os.Readlink(dir + "/exe"); err == nil {
		return filepath.Base(strings.TrimSuffix(exe, " (deleted)"))
	}
	comm, err := os.ReadFile(dir + "/comm") //nolint:gosec // below /proc
	if err != nil {
		return "?"
	}
	return strings.TrimSpace(string(comm))
}

// kernelThread is PF_KTHREAD of the kernel's <linux/sched.h>.
const kernelThread = 0x00200000

// isKernelThread reads the flags of a process.
func isKernelThread(dir string) bool {
	fields := statOf(dir)
	if len(fields) < 7 {
		return false
	}
	flags, err := strconv.ParseUint(fields[6], 10, 64)
	return err == nil && flags&kernelThread != 0
}

// statOf reads the fields of a process that follow its name in parentheses, which may hold
// anything: state, parent, and so on.
func statOf(dir string) []string {
	raw, _ := os.ReadFile(dir + "/stat") //nolint:gosec // below /proc
	return strings.Fields(string(raw[bytes.LastIndexByte(raw, ')')+1:]))
}

// isOwnFork reports whether a process is a fork of this one that has not begun its program
// yet. Until then it has all our descriptors, and our command line.
func isOwnFork(dir string) bool {
	if of := statOf(dir); len(of) < 2 || of[1] != strconv.Itoa(os.Getpid()) {
		return false
	}
	ours, err := os.ReadFile("/proc/self/cmdline")
	theirs, gone := os.ReadFile(dir + "/cmdline") //nolint:gosec // below /proc
	return err == nil && gone == nil && bytes.Equal(ours, theirs)
}
