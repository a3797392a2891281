package fsops

import (
	"errors"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ioctl calls the kernel with a structure of its own, and tells what it returned:
// of some calls a positive number is an error too.
func ioctl[T any](fd int, request uint, arg *T) (int, error) {
	for {
		n, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(request), uintptr(unsafe.Pointer(arg))) //nolint:gosec // the kernel's interface
		if errno == 0 {
			return int(n), nil
		}
		if !errors.Is(errno, unix.EINTR) {
			return 0, errno
		}
	}
}
