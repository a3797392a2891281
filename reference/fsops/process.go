package fsops

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// process tells a process from a later one of the same pid.
type process struct {
	PID int `json:"pid"`
	// Start is when it was started, as the kernel counts.
	Start uint64 `json:"start"`
}

// processOf is the process that has a pid now.
func processOf(pid int) (process, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return process{}, err
	}
	// The name, in brackets, may hold anything.
	fields := strings.Fields(string(raw[strings.LastIndexByte(string(raw), ')')+1:]))
	const startField = 19 // the 22nd of all
	if len(fields) <= startField {
		return process{}, fmt.Errorf("/proc/%d/stat has %d fields", pid, len(fields))
	}
	start, err := strconv.ParseUint(fields[startField], 10, 64)
	return process{PID: pid, Start: start}, err
}

// alive tells whether the process is there.
func (p process) alive() bool {
	now, err := processOf(p.PID)
	return err == nil && now == p
}

// endMillis is how long a process has to end by itself.
const endMillis = 3000

// end ends processes and waits until they have ended.
func end(all []process) {
	var left []int
	for _, p := range all {
		fd, err := unix.PidfdOpen(p.PID, 0)
		if err != nil {
			continue
		}
		// The descriptor is of the process that has the pid now: if that is p, it
		// stays p.
		if !p.alive() {
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

// ended waits for the end of a process.
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
