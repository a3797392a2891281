package scan

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// direntHeader is the length of linux_dirent64 up to its name.
const direntHeader = 19

// eachEntry calls see for every entry of a directory, with a descriptor of it, until see
// returns false.
func eachEntry(path string, see func(dir int, name string, inode uint64) bool) error {
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
			if !see(dir, unix.ByteSliceToString(rest[direntHeader:size]), binary.NativeEndian.Uint64(rest)) {
				return nil
			}
			rest = rest[size:]
		}
	}
}

// isGone reports whether a process or descriptor ended meanwhile.
func isGone(err error) bool { return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH) }

// statxFunc is unix.Statx without flags. Tests replace it.
type statxFunc func(dir int, name string, mask int, st *unix.Statx_t) error

func statx(dir int, name string, mask int, st *unix.Statx_t) error {
	return unix.Statx(dir, name, unix.AT_STATX_DONT_SYNC, mask, st)
}

// inodeOf returns the inode of a directory of /proc, or 0.
func inodeOf(dir string) uint64 {
	var st unix.Stat_t
	_ = unix.Stat(dir, &st)
	return st.Ino
}

// kcmpFiles is KCMP_FILES of the kernel's <linux/kcmp.h>.
const kcmpFiles = 2

// sharesFiles reports whether two threads have the same descriptor table.
func sharesFiles(one, other int) (bool, error) {
	order, _, errno := unix.Syscall6(unix.SYS_KCMP, uintptr(one), uintptr(other), kcmpFiles, 0, 0, 0)
	if errno != 0 {
		return false, errno
	}
	return order == 0, nil
}

// program returns the name of a process's executable file, which a process cannot choose as
// freely as its title.
func (t *table) program() string {
	if t.stuck {
		return commOf(t.dir)
	}
	exe, err := os.Readlink(t.dir + "/exe")
	if err != nil {
		return commOf(t.dir)
	}
	return filepath.Base(strings.TrimSuffix(exe, " (deleted)"))
}

func commOf(dir string) string {
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
func (t *table) isOwnFork() bool {
	if t.stuck {
		return false
	}
	if of := statOf(t.dir); len(of) < 2 || of[1] != strconv.Itoa(os.Getpid()) {
		return false
	}
	ours, err := os.ReadFile("/proc/self/cmdline")
	theirs, gone := os.ReadFile(t.dir + "/cmdline")
	return err == nil && gone == nil && bytes.Equal(ours, theirs)
}

// fdInfo is what /proc/PID/fdinfo tells of a descriptor.
type fdInfo struct {
	flags, inode uint64 // the inode is 0 before Linux 5.14
	mount        int
}

func readInfo(path string) (fdInfo, error) {
	raw, err := os.ReadFile(path) //nolint:gosec // below /proc
	if err != nil {
		return fdInfo{}, err
	}
	var info fdInfo
	for line := range strings.Lines(string(raw)) {
		key, text, _ := strings.Cut(line, ":")
		switch text = strings.TrimSpace(text); key {
		case "flags":
			info.flags, err = strconv.ParseUint(text, 8, 64)
		case "mnt_id":
			info.mount, err = strconv.Atoi(text)
		case "ino":
			info.inode, err = strconv.ParseUint(text, 10, 64)
		}
		if err != nil {
			return fdInfo{}, fmt.Errorf("%s cannot be understood: %w", path, err)
		}
	}
	return info, nil
}

// counts reports whether a descriptor counts. One that only names the file (O_PATH) does
// not, nor one that only reads a regular file, such as that of a backup of a disk image.
func (i fdInfo) counts(f File) bool {
	return i.flags&unix.O_PATH == 0 && (f.Block || i.flags&unix.O_ACCMODE != unix.O_RDONLY)
}

// filesystem is that of a mount.
type filesystem struct {
	known        bool
	major, minor uint32
	kind         string
}

// mayHave reports whether an unseen file of the filesystem may be f. The numbers that btrfs and
// overlayfs tell for a file differ from that of the mount.
func (on filesystem) mayHave(f File, denied bool) bool {
	switch {
	case !on.known:
		return !f.Block || denied
	case f.Block:
		return on.kind == "devtmpfs" || on.kind == "tmpfs"
	}
	return on.kind == "btrfs" || on.kind == "overlay" || on.major == f.Major && on.minor == f.Minor
}

// filesystem returns that of a mount. It is unknown for a mount that the process cannot reach:
// a detached one, or one of another namespace.
func (t *table) filesystem(mount int) filesystem {
	if t.mounts == nil {
		t.mounts = make(map[int]filesystem)
		raw, _ := os.ReadFile(t.dir + "/mountinfo")
		for line := range strings.Lines(string(raw)) {
			id, on := parseMount(line)
			t.mounts[id] = on
		}
	}
	return t.mounts[mount]
}

// parseMount parses a line of mountinfo: ID, parent, major:minor, and the type behind " - ".
func parseMount(line string) (id int, on filesystem) {
	_, super, _ := strings.Cut(line, " - ")
	_, err := fmt.Sscanf(line, "%d %d %d:%d", &id, new(int), &on.major, &on.minor)
	on.kind, _, on.known = strings.Cut(super, " ")
	on.known = on.known && err == nil
	return id, on
}

// isCharacterDevice reports whether /dev has one with an inode, such as /dev/null, which most
// processes have open.
func isCharacterDevice(on filesystem, inode uint64) bool {
	nodes, _ := os.ReadDir("/dev")
	for _, node := range nodes {
		var st unix.Stat_t
		if node.Type()&os.ModeCharDevice != 0 && unix.Lstat("/dev/"+node.Name(), &st) == nil &&
			st.Ino == inode && unix.Major(st.Dev) == on.major && unix.Minor(st.Dev) == on.minor {
			return true
		}
	}
	return false
}
