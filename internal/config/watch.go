package config

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
)

// settle is how long a file must be quiet before it is read: editors and
// Kubernetes change one in several steps.
const settle = 100 * time.Millisecond

// Watcher tells when the configuration file was changed, also where it is replaced
// by a rename or is a link into a ConfigMap that is swapped.
type Watcher struct {
	file  string
	watch *fsnotify.Watcher
}

// Watch begins to watch. Whoever reads the file after that misses no change of it. No
// file ("") never changes.
func Watch(file string) (*Watcher, error) {
	watch, err := fsnotify.NewWatcher()
	if err == nil && file != "" {
		err = watch.Add(filepath.Dir(file))
	}
	if err != nil {
		return nil, fmt.Errorf("watch %s: %w", file, err)
	}
	return &Watcher{file: file, watch: watch}, nil
}

// Run calls changed for each change since Watch, until ctx ends.
func (w *Watcher) Run(ctx context.Context, changed func()) error {
	defer func() { _ = w.watch.Close() }()
	quiet := time.NewTimer(0)
	<-quiet.C
	for {
		select {
		case <-ctx.Done():
			return nil
		case event := <-w.watch.Events:
			if w.concerns(event) {
				quiet.Reset(settle)
			}
		case _, open := <-w.watch.Errors:
			if !open {
				return fmt.Errorf("watch %s: the watch ended", w.file)
			}
			quiet.Reset(settle) // events may be lost: look
		case <-quiet.C:
			changed()
		}
	}
}

// concerns tells whether an event may be about the file: it names it, or the
// "..data" link through which a ConfigMap is swapped.
func (w *Watcher) concerns(event fsnotify.Event) bool {
	if event.Op == fsnotify.Chmod {
		return false
	}
	name := filepath.Base(event.Name)
	return name == filepath.Base(w.file) || name == "..data"
}
