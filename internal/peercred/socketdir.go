package peercred

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/sys"
)

// lockTime bounds the wait for another process that listens in the directory.
const lockTime = 5 * time.Second

// inner is the socket's name while it is in its private directory.
const inner = "s"

// socketDir is the directory of a socket, locked against others who do the same:
// between seeing that a socket is stale and removing it, nobody puts a new one.
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

// unlock closes the directory, and so frees the lock.
func (d socketDir) unlock() { _ = unix.Close(d.fd) }

// clear removes a stale socket and refuses everything else that is there.
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
	conn, err := net.DialTimeout("unix", path, time.Second)
	if err == nil {
		return errors.Join(errors.New("another process serves this socket: stop it, or choose another path"), conn.Close())
	}
	if !errors.Is(err, unix.ECONNREFUSED) {
		return fmt.Errorf("cannot tell whether another process serves it: %w", err)
	}
	return unix.Unlinkat(d.fd, name, 0)
}

// install binds in a directory that only we can enter, sets mode and group
// there, and moves the socket into place. A filesystem without a free inode has only
// that of the stale socket: then it binds beside the place. Until the mode is set, the
// umask and the check of each peer keep others out.
func (d socketDir) install(name, path string, mode uint32, gid int) (*Listener, error) {
	temp := "." + name + ".new"
	private, remove, err := d.private(temp)
	if err == nil {
		var l *Listener
		l, err = d.bind(private, inner, name, path, mode, gid)
		remove()
		if err == nil {
			return l, nil
		}
	}
	if !errors.Is(err, unix.ENOSPC) {
		return nil, err
	}
	_ = unix.Unlinkat(d.fd, temp, 0)
	l, err := d.bind(d.fd, temp, name, path, mode, gid)
	if err != nil {
		_ = unix.Unlinkat(d.fd, temp, 0)
	}
	return l, err
}

// bind makes the socket as temp in a directory, and moves it into place.
func (d socketDir) bind(dir int, temp, name, path string, mode uint32, gid int) (*Listener, error) {
	// By descriptor: the longer path of the private directory may not fit sun_path.
	bound := fmt.Sprintf("/proc/self/fd/%d/%s", dir, temp)
	plain, err := net.ListenUnix("unix", &net.UnixAddr{Name: bound, Net: "unix"})
	if err != nil {
		return nil, err
	}
	plain.SetUnlinkOnClose(false)
	l := &Listener{UnixListener: plain, path: path}
	if err := d.place(dir, temp, name, mode, gid, l); err != nil {
		return nil, errors.Join(err, plain.Close())
	}
	return l, nil
}

func (d socketDir) place(dir int, temp, name string, mode uint32, gid int, l *Listener) error {
	if gid >= 0 {
		if err := unix.Fchownat(dir, temp, -1, gid, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return fmt.Errorf("give it to group %d: %w", gid, err)
		}
	}
	if err := unix.Fchmodat(dir, temp, mode, 0); err != nil {
		return fmt.Errorf("set its mode: %w", err)
	}
	if err := unix.Fstatat(dir, temp, &l.made, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	if err := unix.Renameat2(dir, temp, d.fd, name, unix.RENAME_NOREPLACE); err != nil {
		return fmt.Errorf("move it into place: %w", err)
	}
	return nil
}

// private makes the directory, after removing what a killed process left of it.
func (d socketDir) private(name string) (fd int, remove func(), err error) {
	d.removePrivate(name)
	if err := unix.Mkdirat(d.fd, name, 0o700); err != nil {
		return -1, nil, fmt.Errorf("a private directory beside it: %w", err)
	}
	fd, err = unix.Openat(d.fd, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		d.removePrivate(name)
		return -1, nil, fmt.Errorf("a private directory beside it: %w", err)
	}
	return fd, func() { _ = unix.Close(fd); d.removePrivate(name) }, nil
}

func (d socketDir) removePrivate(name string) {
	fd, err := unix.Openat(d.fd, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	_ = unix.Unlinkat(fd, inner, 0)
	_ = unix.Close(fd)
	_ = unix.Unlinkat(d.fd, name, unix.AT_REMOVEDIR)
}
