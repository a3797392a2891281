package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// A killed run leaves mounts, a directory, and perhaps a container that was created but
// not started. The next run removes them.

const (
	dirPrefix = "crust-conformance-"
	// claimName is a file that a run keeps locked while it lives. It holds the
	// Options of the run.
	claimName = "run.json"
)

// claim marks the directory as one of a live run.
func (n *node) claim() error {
	raw, err := json.Marshal(n.opts)
	if err != nil {
		return err
	}
	file, err := os.OpenFile(n.path(claimName), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	n.base.add(func(context.Context) error { return file.Close() })
	_, err = file.Write(raw)
	return errors.Join(err, unix.Flock(int(file.Fd()), unix.LOCK_EX))
}

// beginAlone lets one run at a time begin, until the file is closed: a directory that
// is not claimed then belongs to a run that was killed.
func beginAlone(dir string) (*os.File, error) {
	file, err := os.Open(dir) //nolint:gosec // the user's own choice
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(file.Fd()), unix.LOCK_EX); err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", dir, err), file.Close())
	}
	return file, nil
}

// clearKilled removes what killed runs left.
func clearKilled(below string) error {
	dirs, err := filepath.Glob(filepath.Join(below, dirPrefix+"*"))
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		if err := clearOne(dir); err != nil {
			return fmt.Errorf("%s was left by a run that was killed, and cannot be removed: %w", dir, err)
		}
	}
	return nil
}

func clearOne(dir string) error {
	file, err := os.Open(filepath.Join(dir, claimName)) //nolint:gosec // a directory of ours
	if errors.Is(err, os.ErrNotExist) {
		// Killed before it was claimed, or just being removed by its run.
		if err = unix.Rmdir(dir); errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.ENOENT) {
			return nil
		}
		return err
	}
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	err = unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil // that run is still alive
	}
	if err != nil {
		return err
	}
	left := &node{dir: dir}
	if err := json.NewDecoder(file).Decode(&left.opts); err != nil {
		// Killed before it had made anything.
		return os.RemoveAll(dir)
	}
	left.handler = newHandler(left.opts, left.dir, left.path("state"), nil)
	return left.clear()
}

func (n *node) clear() error {
	ctx, cancel := context.WithTimeout(context.Background(), cleanupTimeout)
	defer cancel()
	bundles, err := os.ReadDir(n.path("bundles"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	for _, bundle := range bundles {
		c := &container{n: n, id: bundle.Name()}
		if err := c.removeByForce(ctx); err != nil {
			return err
		}
	}
	return n.removeDir()
}
