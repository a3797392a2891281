package deferral

import (
	"errors"
	"strconv"

	"golang.org/x/sys/unix"
)

// noFD stands for "no descriptor".
const noFD = -1

// closeFD closes a descriptor of ours. It is used where nothing was written
// through it, so that no error could tell of lost data.
func closeFD(fd int) {
	if fd >= 0 {
		_ = unix.Close(fd)
	}
}

// procFD names an open descriptor so that a call that takes only a path reaches
// exactly the file that was checked, and no other that took its name.
func procFD(fd int) string { return "/proc/self/fd/" + strconv.Itoa(fd) }

// pathOfFD is the path the kernel gives to an open descriptor.
func pathOfFD(fd int) (string, error) {
	buf := make([]byte, 512)
	for {
		n, err := unix.Readlink(procFD(fd), buf)
		if err != nil {
			return "", err
		}
		if n < len(buf) {
			return string(buf[:n]), nil
		}
		buf = make([]byte, 2*len(buf))
	}
}

// openBeneath opens rel below the directory dir and never leaves it, whatever
// somebody does to the tree meanwhile.
func openBeneath(dir int, rel string, flags, resolve uint64) (int, error) {
	how := unix.OpenHow{
		Flags:   flags | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_MAGICLINKS | resolve,
	}
	for {
		fd, err := unix.Openat2(dir, rel, &how)
		// EAGAIN: a rename raced the walk and the kernel could not prove that it
		// stayed below; the walk is to be done again.
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
			continue
		}
		return fd, err
	}
}

// openDirPath opens a directory for walking only.
func openDirPath(path string) (int, error) {
	return unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
}
