package fsops

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/reference/process"
)

type state struct {
	Key   string `json:"key"`
	Token string `json:"token"`
	// Deadline is when the freeze ends, by clock.
	Deadline int64 `json:"deadline"`
	// Frozen is true once all writes are certainly stopped.
	Frozen    bool              `json:"frozen"`
	Watchdogs []process.Process `json:"watchdogs"`
}

// record is the locked directory for the freeze of one filesystem.
type record struct {
	dir    *os.File
	places int
	name   string
}

const (
	stateFile = "state.json"
	stateNew  = ".state.json"
	mostState = 64 << 10
)

var errLocked = errors.New("another process is freezing or thawing it")

// lockRecord locks a record, and waits at most this long for it.
func lockRecord(places int, name string, within time.Duration) (*record, error) {
	for {
		if err := unix.Mkdirat(places, name, 0o700); err != nil && !errors.Is(err, unix.EEXIST) {
			return nil, fmt.Errorf("make a record of it: %w", err)
		}
		dir, err := openDir(places, name)
		if errors.Is(err, unix.ENOENT) {
			continue // removed since
		}
		if err != nil {
			return nil, fmt.Errorf("open the record of it: %w", err)
		}
		err = sys.Lock(context.Background(), fdOf(dir), within)
		if errors.Is(err, unix.EWOULDBLOCK) {
			err = errLocked
		}
		var st unix.Stat_t
		if err == nil {
			err = unix.Fstat(fdOf(dir), &st)
		}
		if err == nil && st.Nlink > 0 {
			return &record{dir: dir, places: places, name: name}, nil
		}
		_ = dir.Close()
		if err != nil {
			return nil, fmt.Errorf("lock the record of it: %w", err)
		}
		// The process that had locked it has removed it.
	}
}

func (r *record) close() { _ = r.dir.Close() }

func (r *record) read() (state, error) { return readState(fdOf(r.dir), stateFile) }

// readState reads a state file, which is replaced atomically.
func readState(dir int, path string) (s state, err error) {
	fd, err := openAt(dir, path, unix.O_RDONLY)
	if err != nil {
		return s, err
	}
	defer sys.CloseFD(fd)
	raw, err := sys.ReadFD(fd, mostState)
	if err != nil {
		return s, err
	}
	if err := json.Unmarshal(raw, &s); err != nil {
		return s, fmt.Errorf("read the record of its freeze: %w", err)
	}
	return s, nil
}

func (r *record) write(s *state) error {
	raw, err := sys.EncodeJSON(s, mostState)
	if err != nil {
		return err
	}
	_ = unix.Unlinkat(fdOf(r.dir), stateNew, 0) // left by a process that was killed
	err = sys.WriteNew(fdOf(r.dir), stateNew, raw)
	if err == nil {
		err = unix.Renameat(fdOf(r.dir), stateNew, fdOf(r.dir), stateFile)
	}
	if err != nil {
		return fmt.Errorf("put its freeze on record: %w", err)
	}
	return nil
}

// remove removes the record. If that fails, its deadline shows that it is over.
func (r *record) remove() {
	_ = unix.Unlinkat(fdOf(r.dir), stateFile, 0)
	_ = unix.Unlinkat(fdOf(r.dir), stateNew, 0)
	_ = unix.Unlinkat(r.places, r.name, unix.AT_REMOVEDIR)
}

// removeEmpty leaves a record that has a state.
func (r *record) removeEmpty() { _ = unix.Unlinkat(r.places, r.name, unix.AT_REMOVEDIR) }
