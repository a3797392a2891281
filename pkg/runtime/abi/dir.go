package abi

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// Dir is the open directory of a volume. Its methods use the descriptor: they do not touch a
// directory that replaced it meanwhile. A Dir is for one goroutine at a time; the locks of two
// exclude each other within a process, too.
type Dir struct {
	fd   int
	name string
}

// Open opens the directory of a volume below root. If there is none, the error is os.ErrNotExist.
func Open(root, name string) (*Dir, error) {
	if !IsDirName(name) {
		return nil, fmt.Errorf("%q is not the name of a volume's directory", name)
	}
	base, err := sys.OpenDir(root)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: root, Err: err}
	}
	defer sys.CloseFD(base)
	fd, err := sys.OpenBeneath(base, name, unix.O_RDONLY|unix.O_DIRECTORY, unix.RESOLVE_NO_SYMLINKS)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: root + "/" + name, Err: err}
	}
	return &Dir{fd: fd, name: name}, nil
}

// Name returns the directory's name, which is the key of its volume.
func (d *Dir) Name() string { return d.name }

// Close closes the directory and releases its lock. After that each method returns an error.
func (d *Dir) Close() error {
	fd := d.fd
	d.fd = -1 // the number may be another file's by the second call
	return unix.Close(fd)
}

// Lock locks the directory, and waits at most that long for it. Whoever adds or removes files
// beside mountInfo.json must hold the lock.
func (d *Dir) Lock(most time.Duration) error {
	if err := sys.Lock(context.Background(), d.fd, most); err != nil {
		return fmt.Errorf("lock the volume's directory: %w", err)
	}
	return nil
}

// Unlock releases the lock.
func (d *Dir) Unlock() error { return unix.Flock(d.fd, unix.LOCK_UN) }

// Info reads and checks mountInfo.json.
func (d *Dir) Info() (Info, error) {
	raw, err := d.Read(InfoName, MaxInfo)
	if err != nil {
		return Info{}, err
	}
	info, err := Parse(raw)
	if err != nil {
		return Info{}, fmt.Errorf("%s: %w", InfoName, err)
	}
	if target := info.Target(); target != "" && DirName(target) != d.name {
		return Info{}, fmt.Errorf("%s: it is of another volume", InfoName)
	}
	return info, nil
}

// Read reads a regular file of at most limit bytes. It follows no link and does not block, whatever has the name.
func (d *Dir) Read(name string, limit int) ([]byte, error) {
	fd, err := sys.OpenBeneath(d.fd, name, unix.O_RDONLY|unix.O_NONBLOCK, unix.RESOLVE_NO_SYMLINKS)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: name, Err: err}
	}
	defer sys.CloseFD(fd)
	raw, err := sys.ReadFD(fd, int64(limit))
	if err != nil {
		return nil, &os.PathError{Op: "read", Path: name, Err: err}
	}
	return raw, nil
}

// Line reads a file of one line, such as runtime-cli.
func (d *Dir) Line(name string) (string, error) {
	raw, err := d.Read(name, 4096)
	if err != nil {
		return "", err
	}
	line, rest, _ := bytes.Cut(raw, []byte("\n"))
	if len(rest) > 0 || !isPath(string(line)) {
		return "", fmt.Errorf("%s: it is not one line with an absolute path", name)
	}
	return string(line), nil
}

// Put makes or replaces a file atomically. The caller holds the lock.
func (d *Dir) Put(name string, raw []byte) error {
	temp := "." + name + "." + strconv.Itoa(os.Getpid())
	const flags = unix.O_CREAT | unix.O_TRUNC | unix.O_WRONLY | unix.O_NOFOLLOW | unix.O_CLOEXEC
	fd, err := unix.Openat(d.fd, temp, flags, 0o644)
	if err != nil {
		return &os.PathError{Op: "make", Path: temp, Err: err}
	}
	file := os.NewFile(uintptr(fd), temp)
	_, err = file.Write(raw)
	err = errors.Join(err, file.Close())
	if err == nil {
		err = unix.Renameat(d.fd, temp, d.fd, name)
	}
	if err != nil {
		err = errors.Join(fmt.Errorf("write %s: %w", name, err), unix.Unlinkat(d.fd, temp, 0))
	}
	return err
}

// Remove removes a file, and succeeds if there is none. The caller holds the lock.
func (d *Dir) Remove(name string) error {
	err := unix.Unlinkat(d.fd, name, 0)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return &os.PathError{Op: "remove", Path: name, Err: err}
	}
	return nil
}

// maxNames bounds a listing. A volume has few sandboxes, one after the other.
const maxNames = 1024

// Sandboxes lists the ids of sandboxes that left a file, the newest first.
func (d *Dir) Sandboxes() ([]string, error) {
	return sys.NewestFiles(d.fd, ".", maxNames, IsSandboxID)
}
