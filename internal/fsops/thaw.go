package fsops

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/failpoint"
)

// Thaw ends what Freeze began with the same key. No descriptor of the filesystem is
// needed: its watchdogs have one, also when the sandbox has gone. After a thaw none
// of them is left that could keep the filesystem busy.
//
// ErrNotFrozen tells that it is not frozen, or was not up to now: what has been read
// of it meanwhile may be of different times.
func (f Freezer) Thaw(key string) error {
	places, err := f.open()
	if err != nil {
		return fmt.Errorf("thaw the filesystem: %w", err)
	}
	defer func() { _ = places.Close() }()
	names, err := places.Readdirnames(-1)
	if err != nil {
		return fmt.Errorf("thaw the filesystem: %w", err)
	}
	for _, name := range names {
		was, err := readState(fdOf(places), name+"/"+stateFile)
		if err != nil || was.Key != key {
			continue // another one's, or just removed
		}
		dogs, err := thaw(fdOf(places), name, key)
		end(dogs)
		if err != nil {
			return fmt.Errorf("thaw the filesystem: %w", err)
		}
		return nil
	}
	return fmt.Errorf("thaw the filesystem: there is no freeze of it on record: %w", ErrNotFrozen)
}

// thaw gives the watchdogs that have nothing to do any more. The record is free
// again by then.
func thaw(places int, name, key string) (useless []process, err error) {
	rec, err := lockRecord(places, name, patience)
	if err != nil {
		return nil, err
	}
	defer rec.close()
	now, err := rec.read()
	if errors.Is(err, os.ErrNotExist) || err == nil && now.Key != key {
		if err != nil {
			rec.remove()
		}
		return nil, fmt.Errorf("it has been thawed meanwhile: %w", ErrNotFrozen)
	}
	if err != nil {
		return nil, err
	}
	root, err := openHeld(now.Watchdogs)
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(root) }()
	was, err := start(root)
	if err != nil {
		return nil, err
	}
	failpoint.Hit("thaw-thawed")
	rec.remove()
	if !was {
		return now.Watchdogs, fmt.Errorf("somebody else has thawed it before: %w", ErrNotFrozen)
	}
	return now.Watchdogs, nil
}

// openHeld opens the root directory that a watchdog holds.
func openHeld(dogs []process) (int, error) {
	for _, dog := range dogs {
		root, err := unix.Open(fmt.Sprintf("/proc/%d/fd/%d", dog.PID, rootFD), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			continue
		}
		// Only now it is certain whose it was: a pid may be used again.
		if dog.alive() {
			return root, nil
		}
		_ = unix.Close(root)
	}
	return -1, errors.New("its watchdogs have been killed, and nobody holds it any more: freeze it again, which thaws it before, or thaw it with fsfreeze --unfreeze where it is mounted")
}
