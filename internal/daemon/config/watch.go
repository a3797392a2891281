package config

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
)

const (
	// settle is how long a file must be quiet before it is read: editors and
	// Kubernetes change one in several steps.
	settle = 100 * time.Millisecond
	// usualEvery is how often the file is compared with what it was. Some changes raise no
	// event: a new directory under the old name, the target of a link to another directory.
	usualEvery = 10 * time.Second
)

// Watcher reports changes of the configuration file, also where it is replaced by a
// rename or is a link into a ConfigMap that is swapped.
type Watcher struct {
	file  string
	watch *fsnotify.Watcher // nil without a file, or with err
	err   error
	every time.Duration
	seen  os.FileInfo // the file's state at the last change that was reported; nil is no file
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

// Watch begins to watch. A caller that reads the file after that misses no change of it. No
// file ("") never changes.
func Watch(file string) *Watcher {
	w := &Watcher{file: file, every: usualEvery}
	if file == "" {
		return w
	}
	w.seen = stateOf(file)
	watch, err := fsnotify.NewWatcher()
	if err == nil {
		if err = watch.Add(filepath.Dir(file)); err == nil {
			w.watch = watch
			return w
		}
		_ = watch.Close()
	}
	w.err = fmt.Errorf("watch %s: %w", file, err)
	return w
}

// Err is why changes are seen some seconds late, or nil: the kernel had no inotify instance
// or watch left.
func (w *Watcher) Err() error { return w.err }

// Run calls changed for each change since Watch, until ctx ends.
func (w *Watcher) Run(ctx context.Context, changed func()) error {
	if w.file == "" {
		<-ctx.Done()
		return nil
	}
	var events chan fsnotify.Event
	var lost chan error
	if w.watch != nil {
		defer func() { _ = w.watch.Close() }()
		events, lost = w.watch.Events, w.watch.Errors
	}
	tick := time.NewTicker(w.every)
	defer tick.Stop()
	quiet := time.NewTimer(0)
	<-quiet.C
	for {
		select {
		case <-ctx.Done():
			return nil
		case event := <-events:
			if w.concerns(event) {
				quiet.Reset(settle)
			}
		case _, open := <-lost: // events may be lost
			if open {
				quiet.Reset(settle)
			}
		case <-tick.C:
			if now := stateOf(w.file); !sameState(now, w.seen) {
				w.seen = now
				quiet.Reset(settle)
			}
		case <-quiet.C:
			w.seen = stateOf(w.file)
			changed()
		}
	}
}

// concerns reports whether an event may be about the file: it names it, or the
// "..data" link through which a ConfigMap is swapped.
func (w *Watcher) concerns(event fsnotify.Event) bool {
	if event.Op == fsnotify.Chmod {
		return false
	}
	name := filepath.Base(event.Name)
	return name == filepath.Base(w.file) || name == "..data"
}
