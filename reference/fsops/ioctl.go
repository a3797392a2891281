package fsops

import (
	"errors"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ioctl passes a structure to the kernel and returns the result, of which a positive one
// is an error for some requests.
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
