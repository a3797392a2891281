package fsops

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/reference/process"
)

// Thaw ends the freeze with the same key. If no root directory of the filesystem is known (-1), as when the sandbox is
// gone, it is opened through its watchdogs, or by another mount of its device. Afterwards no watchdog is left that could
// keep the filesystem busy. A filesystem whose record or watchdogs were lost is thawed as well: the kernel knows.
//
// ErrNotFrozen means that it was not frozen all the time: data read from its device may be inconsistent.
func (f Freezer) Thaw(key string, root int) error {
	places, err := f.open()
	if err != nil {
		return fmt.Errorf("thaw the filesystem: %w", err)
	}
	defer func() { _ = places.Close() }()
	var dogs []process.Process
	name, err := recordToThaw(places, key, root)
	if err == nil {
		dogs, err = thaw(places, name, func(now state) bool { return now.Key == key }, root, recordTimeout)
	}
	end(dogs)
	if err != nil {
		return fmt.Errorf("thaw the filesystem: %w", err)
	}
	return nil
}

// recordToThaw returns the name of the record to thaw: that of the root directory's filesystem, or else the one with
// the key. After the device of a volume was replaced, the two can differ.
func recordToThaw(places *os.File, key string, root int) (string, error) {
	own, err := "", error(nil)
	if root >= 0 {
		if own, err = recordName(root); err != nil {
			return "", err
		}
		if was, err := readState(fdOf(places), own+"/"+stateFile); err == nil && was.Key == key {
			return own, nil
		}
	}
	name, _, err := findRecord(places, key)
	if err == nil && name == "" && own == "" {
		err = fmt.Errorf("there is no freeze of it on record: %w", ErrNotFrozen)
	}
	return cmp.Or(name, own), err
}

// findRecord returns the record with a key and its name, which is "" if there is none.
func findRecord(places *os.File, key string) (name string, was state, err error) {
	names, err := places.Readdirnames(-1)
	if err != nil {
		return "", state{}, err
	}
	for _, name := range names {
		// A record that cannot be read is not ours, or was removed just now.
		if was, err := readState(fdOf(places), name+"/"+stateFile); err == nil && was.Key == key {
			return name, was, nil
		}
	}
	return "", state{}, nil
}

// thaw thaws the recorded freeze if it is the wanted one. It returns the watchdogs that are no longer needed.
func thaw(places *os.File, name string, wanted func(state) bool, root int, within time.Duration) (useless []process.Process, err error) {
	rec, err := lockRecord(fdOf(places), name, within)
	if err != nil {
		return nil, err
	}
	defer rec.close()
	now, err := rec.read()
	switch {
	case errors.Is(err, os.ErrNotExist):
		defer rec.remove()
		return nil, thawUnrecorded(root, name)
	case err != nil:
		return nil, err
	case !wanted(now):
		return nil, fmt.Errorf("it has been thawed meanwhile: %w", ErrNotFrozen)
	}
	found, err := openFrozen(now.Watchdogs, root, name)
	if errors.Is(err, ErrNotFrozen) {
		rec.remove()
		return now.Watchdogs, err
	}
	if err != nil {
		return nil, err
	}
	defer func() { _ = found.Close() }()
	was, err := thawFS(fdOf(found))
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

// thawUnrecorded thaws a filesystem without a record: that was lost, or another program has frozen it.
func thawUnrecorded(root int, name string) error {
	if found, err := openNamed(root, name); err == nil {
		was, err := thawFS(fdOf(found))
		_ = found.Close()
		if err != nil {
			return err
		}
		if was {
			return fmt.Errorf("there was no freeze of it on record, and yet it was frozen; it has been thawed now: %w", ErrNotFrozen)
		}
	}
	return fmt.Errorf("it has been thawed meanwhile, or was never frozen: %w", ErrNotFrozen)
}

// ThawExpired thaws filesystems that are still frozen after their time: their watchdogs are gone. It returns their
// keys, and when to call it again: after the end of the next recorded freeze, or 0 if there is none.
func (f Freezer) ThawExpired() (keys []string, next time.Duration, err error) {
	places, err := f.open()
	if err != nil {
		return nil, nextTry, err
	}
	names, err := places.Readdirnames(-1)
	if err != nil {
		return nil, nextTry, errors.Join(err, places.Close())
	}
	var running sync.WaitGroup
	running.Add(len(names))
	keys, next, err = thawAll(names, func(name string) (string, time.Duration, error) {
		defer running.Done()
		return thawIfExpired(places, name)
	})
	go func() { running.Wait(); _ = places.Close() }()
	return keys, next, err
}

const thawTime = 20 * time.Second

// thawAll calls thaw for all records at once, and does not wait for one that hangs in the kernel: the others would stay
// frozen. It keeps its record locked, so a later call does not begin the same thaw again.
func thawAll(names []string, thaw func(name string) (key string, left time.Duration, err error)) (keys []string, next time.Duration, err error) {
	type outcome struct {
		key  string
		left time.Duration
		err  error
	}
	ended, hung := sys.All(names, thawTime, func(name string) (one outcome) {
		one.key, one.left, one.err = thaw(name)
		return one
	})
	var errs []error
	failed := func(name string, err error) {
		errs, next = append(errs, fmt.Errorf("thaw %s if its time is over: %w", name, err)), least(next, nextTry)
	}
	for name, one := range ended {
		if one.err != nil {
			failed(name, one.err)
		}
		if one.key != "" {
			keys = append(keys, one.key)
		}
		next = least(next, one.left)
	}
	for _, name := range hung {
		failed(name, fmt.Errorf("it hangs for %v", thawTime))
	}
	slices.Sort(keys)
	return keys, next, errors.Join(errs...)
}

// least returns the shorter of two times, of which 0 is none.
func least(a, b time.Duration) time.Duration {
	if a == 0 || b == 0 {
		return max(a, b)
	}
	return min(a, b)
}

// thawIfExpired returns the key if it has thawed a filesystem, or else how long to wait.
func thawIfExpired(places *os.File, name string) (key string, left time.Duration, err error) {
	was, err := readState(fdOf(places), name+"/"+stateFile)
	if errors.Is(err, os.ErrNotExist) {
		return "", 0, nil // it was removed just now
	}
	if err != nil {
		return "", 0, err
	}
	if left := time.Duration(was.Deadline - clock() + overdue.Nanoseconds()); left > 0 {
		return "", left, nil
	}
	// The filesystem may be frozen again while this waits for the lock.
	dogs, err := thaw(places, name, func(now state) bool { return now.Token == was.Token }, -1, overdue)
	end(dogs)
	switch {
	case err == nil:
		return was.Key, 0, nil
	case errors.Is(err, ErrNotFrozen):
		return "", 0, nil
	}
	return "", 0, err
}

const (
	// overdue is how long after its end a living watchdog has certainly thawed a freeze: it waits for a locked record.
	overdue = 3 * time.Second
	// nextTry is when to retry a thaw that failed.
	nextTry = 30 * time.Second
)

// Stat is Stat for a filesystem that may be frozen under a key. It also reports a freeze without a watchdog to end it.
func (f Freezer) Stat(key string, root int, readOnly bool) (abi.StatsReply, error) {
	reply, err := Stat(root, readOnly)
	if err == nil && f.Forgotten(key) {
		addHeld(reply.Condition)
	}
	return reply, err
}

// addHeld adds that writes are held. Every other fault is worse.
func addHeld(is *abi.Condition) {
	const text = "all writes are held, and the processes that were to end that are gone: thaw it"
	if is.Abnormal {
		is.Message += "; " + text
		return
	}
	*is = abi.Condition{Abnormal: true, Reason: abi.ReasonFrozen, Message: text}
}

// Forgotten reports whether a freeze with this key is recorded of which no watchdog is left to end it.
func (f Freezer) Forgotten(key string) bool {
	places, err := os.Open(f.Dir)
	if err != nil {
		return false // nothing was ever frozen
	}
	defer func() { _ = places.Close() }()
	_, now, err := findRecord(places, key)
	return err == nil && now.Frozen && !slices.ContainsFunc(now.Watchdogs, process.Process.Lives)
}
