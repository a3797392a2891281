package fsops

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// openLevels is how many directories stay open. Those further up are opened again, through
// "..", on the way back, so that a tree may have any depth.
const openLevels = 64

// namesAtOnce is how many names of a directory are read at a time.
const namesAtOnce = 1024

// walk applies a rule to all files below a directory, one directory after another.
type walk struct {
	ctx     context.Context //nolint:containedctx // a walk is one call
	rule    groupRule
	changed int
	levels  []level
}

// level is a directory on the path from the root to the current one.
type level struct {
	dir  *os.File // nil while it is closed
	id   identity
	name string
	todo []string // its subdirectories that are still to be entered
}

// below walks through everything below dir, which stays open. It keeps its path in a list
// and does not recurse, because the workload decides how deep the tree is.
func (w *walk) below(dir *os.File) error {
	defer w.close()
	// A separate descriptor, because levels are closed.
	root, err := openDir(fdOf(dir), ".")
	if err != nil {
		return err
	}
	if err := w.enter(root, ""); err != nil {
		return err
	}
	for len(w.levels) > 0 {
		if err := w.step(); err != nil {
			return err
		}
	}
	return w.ctx.Err()
}

func (w *walk) close() {
	for _, l := range w.levels {
		_ = l.dir.Close() // harmless if it is nil
	}
	w.levels = nil
}

// step enters the next subdirectory, or goes up if none is left.
func (w *walk) step() error {
	top := &w.levels[len(w.levels)-1]
	if len(top.todo) == 0 {
		return w.leave()
	}
	name := top.todo[len(top.todo)-1]
	top.todo = top.todo[:len(top.todo)-1]
	dir, err := openDir(fdOf(top.dir), name)
	if gone(err) {
		return nil
	}
	if err != nil {
		return w.failed(name, err)
	}
	return w.enter(dir, name)
}

// enter changes the files of a directory and collects its subdirectories.
func (w *walk) enter(dir *os.File, name string) error {
	id, err := identify(fdOf(dir))
	w.levels = append(w.levels, level{dir: dir, id: id, name: name})
	if err != nil {
		return w.failed("", err)
	}
	if far := len(w.levels) - 1 - openLevels; far >= 0 {
		_ = w.levels[far].dir.Close()
		w.levels[far].dir = nil
	}
	for {
		if err := w.ctx.Err(); err != nil {
			return w.failed("", err)
		}
		names, err := dir.Readdirnames(namesAtOnce)
		for _, entry := range names {
			if err := w.entry(fdOf(dir), entry); err != nil {
				return w.failed(entry, err)
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return w.failed("", err)
		}
	}
}

// entry changes one file. It works on a descriptor, so that the file that was examined is
// the one that is changed, whatever gets its name meanwhile.
func (w *walk) entry(dir int, name string) error {
	fd, err := openAt(dir, name, unix.O_PATH)
	if gone(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	return w.change(fd, name)
}

// change applies the rule to a file, and adds a directory to those to be entered.
func (w *walk) change(fd int, name string) error {
	isDir, did, err := w.rule.apply(fd)
	if did {
		w.changed++
	}
	if isDir && name != "" {
		top := &w.levels[len(w.levels)-1]
		top.todo = append(top.todo, name)
	}
	return err
}

// leave goes back to the parent directory.
func (w *walk) leave() error {
	last := len(w.levels) - 1
	below := w.levels[last]
	if last > 0 && w.levels[last-1].dir == nil {
		above, err := openAbove(fdOf(below.dir), w.levels[last-1].id)
		if err != nil {
			return w.failed("", err)
		}
		w.levels[last-1].dir = above
	}
	w.levels = w.levels[:last]
	return below.dir.Close()
}

// openAbove opens the parent directory if it is still the same one.
func openAbove(dir int, want identity) (*os.File, error) {
	fd, err := unix.Openat(dir, "..", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	above := os.NewFile(uintptr(fd), "..")
	is, err := identify(fd)
	if err == nil && is != want {
		err = fmt.Errorf("the directory was moved to another one by somebody else: %w", ErrChanged)
	}
	if err != nil {
		_ = above.Close()
		return nil, err
	}
	return above, nil
}

// gone reports whether an error means that the file was removed or replaced, or that
// another filesystem is mounted on it. Another pod may be using the volume.
func gone(err error) bool {
	return isAny(err, unix.ENOENT, unix.ELOOP, unix.ENOTDIR, unix.EXDEV, unix.ESTALE)
}

// mostPath bounds the path in an error.
const mostPath = 256

// failed adds the path to an error. It is quoted because the workload chose the names.
func (w *walk) failed(name string, err error) error {
	var path strings.Builder
	for _, l := range w.levels {
		if l.name != "" && path.Len() < mostPath {
			path.WriteString(l.name + "/")
		}
	}
	place := path.String() + name
	if len(place) > mostPath {
		place = place[:mostPath] + "..."
	}
	return fmt.Errorf("%q: %w", place, err)
}
