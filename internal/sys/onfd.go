package sys

import (
	"errors"
	"fmt"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// OnFD calls f with the descriptor of a connection or file, which stays open and as it
// is meanwhile: the Fd method of a file would make it a blocking one.
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

// Peer asks the kernel which process made the other end of a unix socket.
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
