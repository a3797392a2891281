package backup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// partial is a file that gets its name when it is complete. Until then it is called
// NAME.part, and only one process writes to it.
type partial struct {
	file *os.File
	name string
}

func openPartial(name string) (*partial, error) {
	if err := checkFree(name); err != nil {
		return nil, err
	}
	const flags = os.O_RDWR | unix.O_NOFOLLOW | unix.O_NONBLOCK
	file, err := os.OpenFile(name+".part", flags|os.O_CREATE|os.O_EXCL, 0o600) //nolint:gosec // the caller names it
	made := err == nil
	if errors.Is(err, fs.ErrExist) {
		file, err = os.OpenFile(name+".part", flags, 0) //nolint:gosec // the same
	}
	if err != nil {
		return nil, err
	}
	p := &partial{file, name}
	if err = p.lock(made); err == nil {
		err = uncache(file)
	}
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return p, nil
}

// checkFree refuses a name that is taken, and one of a device that is not there: a file in /dev would take the node's
// memory, which only /dev/shm is meant to.
func checkFree(name string) error {
	info, err := os.Lstat(name)
	full, _ := filepath.Abs(name)
	switch {
	case err == nil && info.Mode().IsRegular():
		return fmt.Errorf("%s: %w", name, ErrExists)
	case err == nil:
		return notRegular(name)
	case !errors.Is(err, fs.ErrNotExist):
		return err
	case sys.Within("/dev", full) && !sys.Within("/dev/shm", full):
		return noDevice(name)
	}
	return nil
}

// uncache drops what the kernel's cache has of a file or device. That may be data that an earlier process
// failed to write: the kernel reports that once, and then shows it as if it were on the disk.
func uncache(file *os.File) error {
	return unix.Fadvise(int(file.Fd()), 0, 0, unix.FADV_DONTNEED)
}

// lock keeps other processes out. It also checks that the file still has its name: a process
// that has just completed it has renamed it. What this process made may still belong to another user, as on NFS.
func (p *partial) lock(made bool) error {
	if err := unix.Flock(int(p.file.Fd()), unix.LOCK_EX|unix.LOCK_NB); errors.Is(err, unix.EWOULDBLOCK) {
		return fmt.Errorf("another process is at work on %s", p.file.Name())
	} else if err != nil {
		return fmt.Errorf("lock %s: %w", p.file.Name(), err)
	}
	mine, err := p.file.Stat()
	if err != nil {
		return err
	}
	there, err := os.Lstat(p.file.Name())
	if err != nil || !os.SameFile(mine, there) || !mine.Mode().IsRegular() {
		return fmt.Errorf("%s was completed or replaced meanwhile, or is no regular file", p.file.Name())
	}
	stat, ok := mine.Sys().(*syscall.Stat_t)
	switch {
	case ok && !made && int(stat.Uid) != os.Geteuid():
		return ofAnother(p.file.Name(), stat.Uid)
	case ok && stat.Nlink > 1:
		return twoNames(p.file.Name()) // left by giveName
	}
	return nil
}

func (p *partial) complete() error {
	if err := p.file.Sync(); err != nil {
		// See uncache: nothing of it may be resumed.
		return errors.Join(err, p.file.Truncate(0))
	}
	rename := func(from, to string) error {
		return unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_NOREPLACE)
	}
	if err := giveName(p.file.Name(), p.name, rename); err != nil {
		return err
	}
	if err := sys.SyncDir(filepath.Dir(p.name)); err != nil {
		return notSynced(p.name, err)
	}
	return nil
}

// giveName renames a file unless the new name exists. NFS and others cannot do that by a rename, but refuse
// to link to a name that exists. If the process is killed in between, the file has both names.
func giveName(from, to string, rename func(from, to string) error) error {
	err := rename(from, to)
	linked := errors.Is(err, unix.EINVAL)
	if linked {
		err = os.Link(from, to)
	}
	if err != nil {
		return notRenamed(from, to, err)
	}
	if !linked {
		return nil
	}
	if err := os.Remove(from); err != nil {
		return notRemoved(to, err)
	}
	return nil
}
