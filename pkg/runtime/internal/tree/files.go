package tree

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/sys"
)

// IsBelow compares by whole path components.
func IsBelow(dir, path string) bool {
	rest, ok := strings.CutPrefix(path, strings.TrimSuffix(dir, "/"))
	return ok && strings.HasPrefix(rest, "/")
}

// ReadSmall reads a regular file of at most limit bytes. It follows no link and
// waits for nothing, whatever stands under the name.
func ReadSmall(path string, limit int) ([]byte, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(fd) }()
	buf := make([]byte, 0, 1024)
	for {
		if len(buf) == cap(buf) {
			buf = append(buf, 0)[:len(buf)]
		}
		n, err := unix.Read(fd, buf[len(buf):cap(buf)])
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return nil, err
		case n == 0:
			return buf, nil
		}
		if buf = buf[:len(buf)+n]; len(buf) > limit {
			return nil, errTooLarge
		}
	}
}

var errTooLarge = errors.New("the file is too large")

// writeNew makes a file that did not exist.
//
// Nothing is synced: the tree is on tmpfs, which has no disk to sync to, and a
// reboot ends the mounts that the file speaks of along with it.
func writeNew(path string, raw []byte) error {
	const flags = unix.O_CREAT | unix.O_EXCL | unix.O_WRONLY | unix.O_NOFOLLOW | unix.O_CLOEXEC
	fd, err := unix.Open(path, flags, 0o600)
	if err != nil {
		return err
	}
	err = sys.WriteAll(fd, raw)
	if closeErr := unix.Close(fd); err == nil {
		err = closeErr
	}
	return err
}

// removeFlat removes a directory of files. It goes into no sub-directory: an
// empty one is removed, any other makes it fail.
func removeFlat(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if err := unlinkOrRmdir(filepath.Join(dir, entry.Name())); err != nil {
			return err
		}
	}
	return ignoreMissing(unix.Rmdir(dir))
}

func unlinkOrRmdir(path string) error {
	err := unix.Unlink(path)
	if errors.Is(err, unix.EISDIR) || errors.Is(err, unix.EPERM) {
		err = unix.Rmdir(path)
	}
	return ignoreMissing(err)
}

func ignoreMissing(err error) error {
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// ReadNames lists a directory, at most limit names of it.
func ReadNames(dir string, limit int) ([]string, error) {
	//nolint:gosec // the directories come from the configuration, or were checked
	file, err := os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	names, err := file.Readdirnames(limit)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return names, err
}
