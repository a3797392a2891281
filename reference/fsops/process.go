package fsops

import (
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/reference/process"
)

// endMillis is how long a process may take to end after SIGTERM.
const endMillis = 3000

// end ends processes and waits until they have ended.
func end(all []process.Process) {
	var left []int
	for _, p := range all {
		fd, err := unix.PidfdOpen(p.PID, 0)
		if err != nil {
			continue
		}
		// The pidfd refers to the process that has the pid now. If that is p, the pidfd
		// stays p's.
		if !p.Lives() {
			_ = unix.Close(fd)
			continue
		}
		_ = unix.PidfdSendSignal(fd, unix.SIGTERM, nil, 0)
		left = append(left, fd)
	}
	for _, fd := range left {
		if !ended(fd) {
			_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
			_ = ended(fd)
		}
		_ = unix.Close(fd)
	}
}

// ended waits for a process to end, and reports whether it did in time.
func ended(pidfd int) bool {
	for until := clock() + endMillis*1e6; ; {
		wait := (until - clock()) / 1e6
		if wait <= 0 {
			return false
		}
		n, _ := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, int(wait)) //nolint:gosec // descriptors are small
		if n > 0 {
			return true
		}
	}
}
