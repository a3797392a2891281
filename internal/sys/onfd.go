package sys

import (
	"errors"
	"syscall"
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
