package sys

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// OpenProgram opens a program that belongs to the user owner and that no other user can write
// to. It follows no symbolic link (ELOOP). An error about the file itself is no unix.Errno.
func OpenProgram(path string, owner uint32) (*os.File, error) {
	fd, err := unix.Openat2(unix.AT_FDCWD, path, &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return nil, err
	}
	if err := checkProgram(fd, owner); err != nil {
		CloseFD(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), path), nil
}

func checkProgram(fd int, owner uint32) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return errors.New("it is not a regular file")
	case st.Uid != owner:
		return fmt.Errorf("it belongs to user %d and must belong to user %d: chown it", st.Uid, owner)
	case st.Mode&0o022 != 0:
		return fmt.Errorf("others can write to it (mode %04o): chmod go-w it", st.Mode&0o7777)
	case st.Mode&0o100 == 0:
		return fmt.Errorf("it is not executable (mode %04o)", st.Mode&0o7777)
	}
	return nil
}
