package peercred

import (
	"context"
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

// Listener is a unix socket that removes its file when it is closed, unless another file
// has replaced it.
type Listener struct {
	*net.UnixListener
	path string
	made unix.Stat_t
	once sync.Once
	err  error
}

// Listen creates a unix socket at path with a mode of 0600 or 0660 and, unless empty, the
// given group. It appears with its final mode and owner: it is created under another name
// with mode 0600, and renamed into place. A stale socket is replaced; a socket that is
// served, a symbolic link and any other file never are.
func Listen(path string, mode fs.FileMode, group string) (*Listener, error) {
	l, err := listen(path, mode, group)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	return l, nil
}

func listen(path string, mode fs.FileMode, group string) (*Listener, error) {
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
	dir, err := lockParent(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer dir.unlock()
	name := filepath.Base(path)
	if err := dir.clear(name, path); err != nil {
		return nil, err
	}
	return dir.install(name, path, uint32(mode), gid)
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
const lockTime = 5 * time.Second

// tempName is a socket's name until it is renamed into place. kubelet ignores names that
// begin with a dot.
const tempName = ".crust-proxy.new"

// socketDir is the directory of a socket, locked against other processes that do the same:
// no other one can put a new socket there between the check that the old one is stale and
// its removal.
type socketDir struct{ fd int }

func lockParent(path string) (socketDir, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return socketDir{}, fmt.Errorf("the directory %s: %w", path, err)
	}
	if err := sys.Lock(context.Background(), fd, lockTime); err != nil {
		return socketDir{}, errors.Join(fmt.Errorf("lock the directory %s: %w", path, err), unix.Close(fd))
	}
	return socketDir{fd: fd}, nil
}

// unlock closes the directory, which releases the lock.
func (d socketDir) unlock() { _ = unix.Close(d.fd) }

// clear removes a stale socket, and refuses everything else.
func (d socketDir) clear(name, path string) error {
	var there unix.Stat_t
	err := unix.Fstatat(d.fd, name, &there, unix.AT_SYMLINK_NOFOLLOW)
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
		return errors.New("another process serves this socket: stop it, or choose another path")
	}
	return unix.Unlinkat(d.fd, name, 0)
}

// install binds under a temporary name, sets mode and group, and renames the socket into
// place.
func (d socketDir) install(name, path string, mode uint32, gid int) (*Listener, error) {
	_ = unix.Unlinkat(d.fd, tempName, 0) // a killed process may have left it
	// By descriptor: the path of the temporary name may not fit sun_path.
	config := net.ListenConfig{Control: ownerOnly}
	bound, err := config.Listen(context.Background(), "unix", sys.ProcFD(d.fd)+"/"+tempName)
	if err != nil {
		return nil, err
	}
	plain, ok := bound.(*net.UnixListener)
	if !ok {
		return nil, errors.Join(fmt.Errorf("a unix socket is a %T", bound), bound.Close())
	}
	plain.SetUnlinkOnClose(false)
	l := &Listener{UnixListener: plain, path: path}
	if err := d.place(name, mode, gid, l); err != nil {
		return nil, errors.Join(err, unix.Unlinkat(d.fd, tempName, 0), plain.Close())
	}
	return l, nil
}

// ownerOnly sets the mode of a socket before it is bound. The kernel gives this mode to the
// file, so that others cannot connect at any instant.
func ownerOnly(_, _ string, socket syscall.RawConn) error {
	var failed error
	err := socket.Control(func(fd uintptr) { failed = unix.Fchmod(int(fd), 0o600) })
	return errors.Join(err, failed)
}

func (d socketDir) place(name string, mode uint32, gid int, l *Listener) error {
	if gid >= 0 {
		if err := unix.Fchownat(d.fd, tempName, -1, gid, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return fmt.Errorf("give it to group %d: %w", gid, err)
		}
	}
	if err := unix.Fchmodat(d.fd, tempName, mode, 0); err != nil {
		return fmt.Errorf("set its mode: %w", err)
	}
	if err := unix.Fstatat(d.fd, tempName, &l.made, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	if err := unix.Renameat2(d.fd, tempName, d.fd, name, unix.RENAME_NOREPLACE); err != nil {
		return fmt.Errorf("move it into place: %w", err)
	}
	return nil
}
