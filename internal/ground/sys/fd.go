package sys

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// NoFD stands for "no descriptor".
const NoFD = -1

// CloseFD closes a descriptor; NoFD is allowed. Use it only for descriptors that
// nothing was written through: it ignores the error of close.
func CloseFD(fd int) {
	if fd >= 0 {
		_ = unix.Close(fd)
	}
}

// ProcFD returns a path for an open descriptor. A call that takes only a path then
// reaches the file that was checked, even if another file has taken its name.
func ProcFD(fd int) string { return "/proc/self/fd/" + strconv.Itoa(fd) }

// PathOfFD returns the path that the kernel gives to an open descriptor.
func PathOfFD(fd int) (string, error) {
	buf := make([]byte, 512)
	for {
		n, err := unix.Readlink(ProcFD(fd), buf)
		if err != nil {
			return "", err
		}
		if n < len(buf) {
			return string(buf[:n]), nil
		}
		buf = make([]byte, 2*len(buf))
	}
}

// maxWalks bounds how often a walk is begun again: a workload can rename without end.
const maxWalks = 1000

// OpenBeneath opens rel below the directory dir. The kernel guarantees that the walk
// never leaves dir, even if somebody changes the tree meanwhile.
func OpenBeneath(dir int, rel string, flags, resolve uint64) (fd int, err error) {
	how := unix.OpenHow{
		Flags:   flags | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_MAGICLINKS | resolve,
	}
	for range maxWalks {
		fd, err = unix.Openat2(dir, rel, &how)
		// EAGAIN: a rename raced the walk, and the kernel could not prove that it stayed below.
		if !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) {
			return fd, err
		}
	}
	return NoFD, err
}

// ProbeOpenat2 tries whether paths can be resolved safely.
func ProbeOpenat2() error {
	fd, err := OpenBeneath(unix.AT_FDCWD, ".", unix.O_PATH, 0)
	CloseFD(fd)
	return err
}

// OpenDir opens a directory with O_PATH: only to walk from it.
func OpenDir(path string) (int, error) {
	return unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
}

// Below returns the part of p under dir, compared by whole path components.
func Below(dir, p string) (string, bool) {
	if dir == "/" {
		return strings.TrimPrefix(p, "/"), p != "/"
	}
	rest, ok := strings.CutPrefix(p, dir)
	if !ok || len(rest) < 2 || rest[0] != '/' {
		return "", false
	}
	return rest[1:], true
}

// Within reports whether p is dir or lies below it.
func Within(dir, p string) bool {
	_, below := Below(dir, p)
	return below || dir == p
}

// WriteAll writes all of raw to a descriptor.
func WriteAll(fd int, raw []byte) error {
	for len(raw) > 0 {
		n, err := unix.Write(fd, raw)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return err
		}
		raw = raw[n:]
	}
	return nil
}

// WriteSynced replaces a file, so that a crash or a power cut leaves the old one or the new one.
func WriteSynced(path string, raw []byte) error {
	temp := path + ".new"
	fd, err := unix.Open(temp, unix.O_CREAT|unix.O_TRUNC|unix.O_WRONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	err = WriteAll(fd, raw)
	if err == nil {
		err = unix.Fsync(fd)
	}
	err = errors.Join(err, unix.Close(fd))
	if err == nil {
		err = unix.Rename(temp, path)
	}
	if err != nil {
		return errors.Join(err, unix.Unlink(temp))
	}
	return SyncDir(filepath.Dir(path))
}

// UnlessMissing drops the error of a file that does not exist, or has just gone.
func UnlessMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// SyncDir makes the names in a directory survive a power cut.
func SyncDir(path string) error {
	dir, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer CloseFD(dir)
	return unix.Fsync(dir)
}

// WriteNew makes a file that did not exist, whole or not at all. The name is relative to the directory dir.
//
// Nothing is synced: callers write to a tmpfs, which has no disk. What the file describes does
// not survive a reboot either.
func WriteNew(dir int, name string, raw []byte) error {
	fd, err := unix.Openat(dir, name, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	err = WriteAll(fd, raw)
	// Only close may report a full disk.
	if closeErr := unix.Close(fd); err == nil {
		err = closeErr
	}
	if err != nil {
		_ = unix.Unlinkat(dir, name, 0)
	}
	return err
}

// InDir calls do, which puts something into dir. Where that fails because dir is missing, it makes dir and calls do
// again: somebody may remove a directory of ours. ENOENT then means that what do moves there is missing.
func InDir(dir string, do func() error) error {
	err := do()
	if errors.Is(err, unix.ENOENT) {
		if err = os.MkdirAll(dir, 0o700); err == nil {
			err = do()
		}
	}
	return err
}

// ReadSmall reads a regular file of at most limit bytes, with as few system calls as
// possible. It does not follow a symbolic link in the last component. Of files of /proc, which have no size, it reads nothing.
func ReadSmall(path string, limit int64) ([]byte, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer CloseFD(fd)
	return ReadFD(fd, limit)
}

// ReadLine reads a file of the kernel, such as one in sysfs, that holds one short line.
// os.ReadFile would need three times the system calls, among them some of epoll.
func ReadLine(path string) (string, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", err
	}
	defer CloseFD(fd)
	line := make([]byte, 128)
	n, err := unix.Read(fd, line)
	return strings.TrimSpace(string(line[:max(n, 0)])), err
}

// ReadFD reads an open file as ReadSmall does.
func ReadFD(fd int, limit int64) ([]byte, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size > limit {
		return nil, fmt.Errorf("not a regular file of at most %d bytes", limit)
	}
	raw := make([]byte, st.Size)
	n, err := unix.Pread(fd, raw, 0)
	return raw[:max(n, 0)], err
}

// NewestFiles lists regular files with a wanted name in the directory dir, which is relative
// to at: the newest first, and no more than most.
func NewestFiles(at int, dir string, most int, want func(name string) bool) ([]string, error) {
	fd, err := unix.Openat(at, dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	file := os.NewFile(uintptr(fd), dir)
	defer func() { _ = file.Close() }()
	names, err := file.Readdirnames(-1) // no order is promised: the last may be the newest
	if err != nil {
		return nil, err
	}
	made := make(map[string]int64, len(names))
	names = slices.DeleteFunc(names, func(name string) bool {
		var st unix.Stat_t
		if !want(name) || unix.Fstatat(fd, name, &st, unix.AT_SYMLINK_NOFOLLOW) != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
			return true
		}
		made[name] = st.Mtim.Nano()
		return false
	})
	slices.SortFunc(names, func(a, b string) int {
		return cmp.Or(cmp.Compare(made[b], made[a]), strings.Compare(a, b))
	})
	return names[:min(most, len(names))], nil
}

// BootID identifies the current boot of the machine.
func BootID() (string, error) { return ReadLine("/proc/sys/kernel/random/boot_id") }

// DialUnix connects to a socket.
func DialUnix(ctx context.Context, socket string) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, "unix", socket)
}

// OnFD calls f with the descriptor of a connection or file, which stays open meanwhile. It
// does not change the descriptor: the Fd method of a file would make it a blocking one.
func OnFD(conn syscall.Conn, f func(fd int) error) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) { failed = f(int(fd)) })
	return errors.Join(err, failed)
}

// MaxSocketPath is the room for a path in sun_path, without its final NUL.
const MaxSocketPath = 107

// Peer returns the credentials of the process that opened the other end of a unix socket, from the kernel.
func Peer(conn net.Conn) (who *unix.Ucred, err error) {
	local, ok := conn.(*net.UnixConn)
	if !ok {
		return nil, fmt.Errorf("a %T is no unix socket", conn)
	}
	err = OnFD(local, func(fd int) (err error) {
		who, err = unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
		return err
	})
	return who, err
}

// IsServed reports whether a process listens on a unix socket. It does not wait: a full queue
// of connections has a process that serves it.
func IsServed(socket string) (bool, error) {
	if len(socket) > MaxSocketPath {
		return false, nil // no process can listen there
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return false, err
	}
	defer CloseFD(fd)
	err = unix.Connect(fd, &unix.SockaddrUnix{Name: socket})
	switch {
	case err == nil, errors.Is(err, unix.EAGAIN):
		return true, nil
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ECONNREFUSED):
		return false, nil
	default:
		return false, err
	}
}
