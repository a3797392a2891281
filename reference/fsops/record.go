package fsops

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/sys"
	"github.com/crust-proxy/crust-proxy/reference/process"
)

// state is what is on record of a freeze.
type state struct {
	Key   string `json:"key"`
	Token string `json:"token"`
	// Deadline is by clock.
	Deadline int64 `json:"deadline"`
	// Frozen is false until all writes are stopped for certain.
	Frozen    bool              `json:"frozen"`
	Watchdogs []process.Process `json:"watchdogs"`
}

// record is the directory of one filesystem's freeze, locked.
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

// errLocked: another process is at work on the record.
var errLocked = errors.New("another process is freezing or thawing it")

// lockRecord takes a record, within a time.
func lockRecord(places int, name string, within time.Duration) (*record, error) {
	for until := clock() + within.Nanoseconds(); ; time.Sleep(5 * time.Millisecond) {
		r, err := tryRecord(places, name)
		if !errors.Is(err, errLocked) || clock() >= until {
			return r, err
		}
	}
}

// tryRecord takes a record if nobody has it.
func tryRecord(places int, name string) (*record, error) {
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
		linked, err := lock(fdOf(dir))
		if err == nil && linked {
			return &record{dir: dir, places: places, name: name}, nil
		}
		_ = dir.Close()
		if err != nil {
			return nil, err
		}
	}
}

// lock locks a directory and tells whether it still has its name: the one before may
// have removed it.
func lock(dir int) (linked bool, err error) {
	err = unix.Flock(dir, unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return false, errLocked
	}
	if err != nil {
		return false, fmt.Errorf("lock the record of it: %w", err)
	}
	var st unix.Stat_t
	err = unix.Fstat(dir, &st)
	return st.Nlink > 0, err
}

// close lets others have the record.
func (r *record) close() { _ = r.dir.Close() }

func (r *record) read() (state, error) { return readState(fdOf(r.dir), stateFile) }

// readState reads what is on record, which is whole at all times.
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

// write replaces what is on record.
func (r *record) write(s *state) error {
	raw, err := json.Marshal(s)
	if err != nil {
		return err
	}
	_ = unix.Unlinkat(fdOf(r.dir), stateNew, 0) // a killed process may have left it
	err = sys.WriteNew(fdOf(r.dir), stateNew, raw)
	if err == nil {
		err = unix.Renameat(fdOf(r.dir), stateNew, fdOf(r.dir), stateFile)
	}
	if err != nil {
		return fmt.Errorf("put its freeze on record: %w", err)
	}
	return nil
}

// remove forgets the freeze. A record that stays is known by its deadline.
func (r *record) remove() {
	_ = unix.Unlinkat(fdOf(r.dir), stateFile, 0)
	_ = unix.Unlinkat(fdOf(r.dir), stateNew, 0)
	_ = unix.Unlinkat(r.places, r.name, unix.AT_REMOVEDIR)
}

// removeEmpty forgets a record that holds nothing.
func (r *record) removeEmpty() { _ = unix.Unlinkat(r.places, r.name, unix.AT_REMOVEDIR) }
