package peercred

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// Listener is a unix socket that removes its file when it is closed, unless another file has replaced it.
type Listener struct {
	*net.UnixListener
	path string
	made unix.Stat_t
	once sync.Once
	err  error
}

// Listen creates a unix socket at path with a mode of 0600 or 0660 and, unless empty, the given group. It appears with
// its final mode and owner: it is created under another name with mode 0600, and renamed into place. A stale socket is
// replaced; a socket that is served, a symbolic link and any other file never are.
func Listen(path string, mode fs.FileMode, group string) (*Listener, error) {
	return listen(path, mode, group, false)
}

// Replace is Listen with mode 0600, and replaces whatever has the name: the caller owns it, and keeps
// other processes off by a lock of its own. No lock of others is waited for, and what is there stays
// until the new socket listens, also if that fails.
func Replace(path string) (*Listener, error) { return listen(path, 0o600, "", true) }

func listen(path string, mode fs.FileMode, group string, replace bool) (l *Listener, err error) {
	defer func() {
		if err != nil {
			l, err = nil, fmt.Errorf("listen on %s: %w", path, err)
		}
	}()
	if mode != 0o600 && mode != 0o660 {
		return nil, fmt.Errorf("the mode is %#o, allowed are 0600 and 0660", mode)
	}
	if !filepath.IsAbs(path) || len(path) > sys.MaxSocketPath {
		return nil, fmt.Errorf("the path must be absolute and of at most %d bytes", sys.MaxSocketPath)
	}
	gid, err := groupID(group)
	if err != nil {
		return nil, err
	}
	dir, err := openParent(path)
	if err != nil {
		return nil, err
	}
	defer sys.CloseFD(dir.fd)
	if replace {
		return dir.install(path, uint32(mode), gid, 0)
	}
	// Whoever can open the directory, if only to read it, can hold its lock for ever. It then goes on
	// without: only two processes that replace one stale socket at once need it.
	_ = sys.Lock(context.Background(), dir.fd, lockTime)
	if err := dir.clear(path); err != nil {
		return nil, err
	}
	return dir.install(path, uint32(mode), gid, unix.RENAME_NOREPLACE)
}

// Addr is the address that clients dial; the socket was bound under another name.
func (l *Listener) Addr() net.Addr { return &net.UnixAddr{Name: l.path, Net: "unix"} }

// Close stops listening, and removes the file if it is still the one that Listen created.
func (l *Listener) Close() error {
	l.once.Do(func() {
		var now unix.Stat_t
		if unix.Lstat(l.path, &now) == nil && now.Dev == l.made.Dev && now.Ino == l.made.Ino {
			l.err = os.Remove(l.path)
		}
		l.err = errors.Join(l.err, l.UnixListener.Close())
	})
	return l.err
}

// groupID resolves a name or a number; -1 keeps the group as it is.
func groupID(group string) (int, error) {
	if group == "" {
		return -1, nil
	}
	if id, err := strconv.ParseUint(group, 10, 31); err == nil {
		return int(id), nil
	}
	found, err := user.LookupGroup(group)
	if err != nil {
		return 0, fmt.Errorf("the group %q: %w", group, err)
	}
	return strconv.Atoi(found.Gid)
}

// lockTime bounds the wait for another process that listens in the directory.
var lockTime = 2 * time.Second

// socketDir is the directory of a socket. A lock on it keeps other processes that listen there from putting
// a new socket there between the check that the old one is stale and its removal.
type socketDir struct {
	fd         int
	name, temp string
}

// openParent opens the directory of a socket. Until the socket is renamed into place, it has a name that
// begins with a dot, which kubelet ignores, and that no process uses for another socket.
func openParent(path string) (socketDir, error) {
	dir, name := filepath.Dir(path), filepath.Base(path)
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return socketDir{}, fmt.Errorf("the directory %s: %w", dir, err)
	}
	sum := sha256.Sum256([]byte(name))
	return socketDir{fd: fd, name: name, temp: ".crust-proxy." + hex.EncodeToString(sum[:8])}, nil
}

// clear removes a stale socket, and refuses everything else.
func (d socketDir) clear(path string) error {
	var there unix.Stat_t
	err := unix.Fstatat(d.fd, d.name, &there, unix.AT_SYMLINK_NOFOLLOW)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	if there.Mode&unix.S_IFMT != unix.S_IFSOCK {
		return errors.New("there is something that is not a socket: move it away, or choose another path")
	}
	served, err := sys.IsServed(path)
	if err != nil {
		return fmt.Errorf("cannot tell whether another process serves it: %w", err)
	}
	if served {
		return errors.New("another process serves this socket (systemd, for a .socket unit?): stop it, or choose another path")
	}
	return unix.Unlinkat(d.fd, d.name, 0)
}

// install binds under a temporary name, sets mode and group, and renames the socket into place.
func (d socketDir) install(path string, mode uint32, gid int, rename uint) (*Listener, error) {
	_ = unix.Unlinkat(d.fd, d.temp, 0) // a killed process may have left it
	// By descriptor: the path of the temporary name may not fit sun_path.
	config := net.ListenConfig{Control: ownerOnly}
	bound, err := config.Listen(context.Background(), "unix", sys.ProcFD(d.fd)+"/"+d.temp)
	if err != nil {
		return nil, err
	}
	plain, ok := bound.(*net.UnixListener)
	if !ok {
		return nil, errors.Join(fmt.Errorf("a unix socket is a %T", bound), bound.Close())
	}
	plain.SetUnlinkOnClose(false)
	l := &Listener{UnixListener: plain, path: path}
	if err := d.place(mode, gid, rename, l); err != nil {
		return nil, errors.Join(err, unix.Unlinkat(d.fd, d.temp, 0), plain.Close())
	}
	return l, nil
}

// ownerOnly sets the mode of a socket before it is bound. The kernel gives this mode to the
// file, so that others cannot connect at any instant.
func ownerOnly(_, _ string, socket syscall.RawConn) (failed error) {
	err := socket.Control(func(fd uintptr) { failed = unix.Fchmod(int(fd), 0o600) })
	return errors.Join(err, failed)
}

func (d socketDir) place(mode uint32, gid int, rename uint, l *Listener) error {
	if gid >= 0 {
		if err := unix.Fchownat(d.fd, d.temp, -1, gid, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return fmt.Errorf("give it to group %d: %w", gid, err)
		}
	}
	if err := unix.Fchmodat(d.fd, d.temp, mode, 0); err != nil {
		return fmt.Errorf("set its mode: %w", err)
	}
	if err := unix.Fstatat(d.fd, d.temp, &l.made, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	if err := unix.Renameat2(d.fd, d.temp, d.fd, d.name, rename); err != nil {
		return fmt.Errorf("move it into place: %w", err)
	}
	return nil
}
