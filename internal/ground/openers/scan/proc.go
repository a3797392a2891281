package scan

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// eachNumber calls see for every entry of a directory whose name is a number, with a descriptor of the
// directory, until see returns false.
func eachNumber(path string, see func(dir, number int) bool) error {
	dir, err := os.Open(path) //nolint:gosec // below /proc
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	for {
		names, err := dir.Readdirnames(512)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		for _, name := range names {
			if number, err := strconv.Atoi(name); err == nil && !see(int(dir.Fd()), number) {
				return nil
			}
		}
	}
}

// isGone reports whether a process or descriptor ended meanwhile.
func isGone(err error) bool { return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH) }

// statxFunc is unix.Statx without flags. Tests replace it.
type statxFunc func(dir, fd, mask int, st *unix.Statx_t) error

func statx(dir, fd, mask int, st *unix.Statx_t) error {
	return unix.Statx(dir, strconv.Itoa(fd), unix.AT_STATX_DONT_SYNC, mask, st)
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

// holder names the process by its executable file, which it cannot choose as freely as its title.
func (t *table) holder() Holder {
	h := Holder{PID: t.pid, Program: commOf(t.dir)}
	if t.stuck {
		return h
	}
	if exe, err := os.Readlink(t.dir + "/exe"); err == nil {
		h.Program = filepath.Base(strings.TrimSuffix(exe, " (deleted)"))
	}
	return h
}

func commOf(dir string) string {
	comm, err := os.ReadFile(dir + "/comm") //nolint:gosec // below /proc
	if err != nil {
		return "?"
	}
	return strings.TrimSpace(string(comm))
}

// parentOf returns the parent of a process, or "". It follows the name in parentheses, which may hold
// anything, and the state.
func parentOf(dir string) string {
	raw, _ := os.ReadFile(dir + "/stat") //nolint:gosec // below /proc
	fields := strings.Fields(string(raw[bytes.LastIndexByte(raw, ')')+1:]))
	if len(fields) < 2 {
		return ""
	}
	return fields[1]
}

// isOwnFork reports whether a process is a fork of this one that has not begun its program
// yet. Until then it has all our descriptors, and our command line.
func (t *table) isOwnFork() bool {
	if t.stuck || parentOf(t.dir) != strconv.Itoa(os.Getpid()) {
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

func (t *table) info(fd int) (info fdInfo, err error) {
	raw, err := os.ReadFile(t.dir + "/fdinfo/" + strconv.Itoa(fd))
	if err != nil {
		return fdInfo{}, err
	}
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
			return fdInfo{}, fmt.Errorf("descriptor %d: what /proc says of it cannot be understood: %w", fd, err)
		}
	}
	return info, nil
}

// counts reports whether a descriptor counts. One that only names the file (O_PATH) does
// not, nor one that only reads a regular file, such as that of a backup of a disk image.
func (i fdInfo) counts(f File) bool {
	return i.flags&unix.O_PATH == 0 && (f.Block || i.flags&unix.O_ACCMODE != unix.O_RDONLY)
}

type filesystem struct {
	known        bool
	major, minor uint32
	kind         string
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

// isCharacterDevice reports whether /dev has one with an inode, such as /dev/null, which most processes have open.
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
