package config

import (
	"context"
	"os"
	"time"
)

const (
	// watchEvery is how often the file is compared with what it was. This sees also what raises no event of
	// inotify: a new directory under the old name, the target of a link to another one. Each look costs a dozen
	// wake-ups of Go's scheduler.
	watchEvery = 20 * time.Second
	// quiet is for how long a changed file has to stay as it is before it is read.
	quiet = 2 * time.Second
)

// mostChanging is for how many looks in a row a file may change before it is read nevertheless.
const mostChanging = 5

// Watcher reports changes of the configuration file, also where it is replaced by a rename or
// is a link into a ConfigMap that is swapped.
type Watcher struct {
	file string
	seen os.FileInfo // the file's state at the last change that was reported; nil is no file
}

// stateOf returns what tells one state of a file from another; nil is no file.
func stateOf(file string) os.FileInfo {
	info, err := os.Stat(file)
	if err != nil {
		return nil
	}
	return info
}

func sameState(a, b os.FileInfo) bool {
	if a == nil || b == nil {
		return a == b
	}
	return os.SameFile(a, b) && a.ModTime().Equal(b.ModTime()) && a.Size() == b.Size()
}

// Watch begins to watch. A caller that reads the file after that misses no change of it. No file ("") never changes.
func Watch(file string) *Watcher { return &Watcher{file: file, seen: stateOf(file)} }

// Run calls changed for each change since Watch, and for each signal, until ctx ends. A change
// is reported when the file has been quiet for some time, because editors and Kubernetes
// change one in several steps, or does not become quiet.
func (w *Watcher) Run(ctx context.Context, signals <-chan os.Signal, changed func()) error {
	before, changing := w.seen, 0
	for {
		wait := watchEvery
		if changing > 0 {
			wait = quiet
		}
		select {
		case <-ctx.Done():
			return nil
		case <-signals:
			w.seen = stateOf(w.file)
			changed()
			continue
		case <-time.After(wait):
		}
		now := stateOf(w.file)
		if changing++; sameState(now, w.seen) {
			changing = 0
		} else if sameState(now, before) || changing > mostChanging {
			w.seen, changing = now, 0
			changed()
		}
		before = now
	}
}
