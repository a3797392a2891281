package backup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// partial is a file that gets its name when it is complete. Until then it is called
// NAME.part, and only one process has it.
type partial struct {
	file *os.File
	name string
}

func openPartial(name string) (*partial, error) {
	if _, err := os.Lstat(name); !errors.Is(err, fs.ErrNotExist) {
		if err == nil {
			err = ErrExists
		}
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	file, err := os.OpenFile(name+".part", os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600) //nolint:gosec // the caller names it
	if err != nil {
		return nil, err
	}
	p := &partial{file, name}
	if err := p.lock(); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return p, nil
}

// lock keeps other processes out. One that has just completed the file has renamed it.
func (p *partial) lock() error {
	if err := unix.Flock(int(p.file.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return fmt.Errorf("another process is at work on %s: %w", p.file.Name(), err)
	}
	mine, err := p.file.Stat()
	if err != nil {
		return err
	}
	there, err := os.Lstat(p.file.Name())
	if err != nil || !os.SameFile(mine, there) || !mine.Mode().IsRegular() {
		return fmt.Errorf("%s was completed or replaced meanwhile, or is no regular file", p.file.Name())
	}
	return nil
}

// complete gives the file its name, and has all of it on the disk.
func (p *partial) complete() error {
	if err := p.file.Sync(); err != nil {
		return err
	}
	if err := unix.Renameat2(unix.AT_FDCWD, p.file.Name(), unix.AT_FDCWD, p.name, unix.RENAME_NOREPLACE); err != nil {
		return fmt.Errorf("rename %s to %s: %w", p.file.Name(), p.name, err)
	}
	dir, err := os.Open(filepath.Dir(p.name))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
