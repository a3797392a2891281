package kata

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// listenOne listens with the smallest queue there is.
func listenOne(t *testing.T, socket string) *os.File {
	t.Helper()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: socket}); err != nil {
		t.Fatal(err)
	}
	if err := unix.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	return os.NewFile(uintptr(fd), socket)
}

func unixMkfifo(path string) error { return unix.Mkfifo(path, 0o600) }
