package sys

import (
	"errors"
	"fmt"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

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
