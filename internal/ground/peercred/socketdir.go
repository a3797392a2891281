package peercred

import (
	"context"
	"errors"
	"fmt"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

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
