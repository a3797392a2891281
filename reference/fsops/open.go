package fsops

import (
	"os"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// openAt opens a path below a directory. It follows no links, enters no other mount and
// does not leave the directory.
func openAt(dir int, name string, flags uint64) (int, error) {
	return sys.OpenBeneath(dir, name, flags|unix.O_NOFOLLOW, unix.RESOLVE_NO_XDEV|unix.RESOLVE_NO_SYMLINKS)
}

// openDir opens a directory for reading. With the name ".", it opens an O_PATH descriptor,
// such as that of a new mount, again for reading.
func openDir(dir int, name string) (*os.File, error) {
	fd, err := openAt(dir, name, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}

// fdOf returns the descriptor of an open file.
func fdOf(f *os.File) int { return int(f.Fd()) }

// identity identifies a file while the file exists.
type identity struct{ dev, ino uint64 }

func identify(fd int) (identity, error) {
	var st unix.Stat_t
	err := unix.Fstat(fd, &st)
	return identity{uint64(st.Dev), st.Ino}, err //nolint:unconvert // narrower on other architectures
}
