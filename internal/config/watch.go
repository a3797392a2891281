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

// Watcher calls Changed when the configuration file was changed, also where it
// is replaced by a rename or is a link into a ConfigMap that is swapped.
type Watcher struct {
	File    string
	Changed func()
}

// Run watches until ctx ends.
func (w *Watcher) Run(ctx context.Context) error {
	if w.File == "" {
		<-ctx.Done()
		return nil
	}
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("watch %s: %w", w.File, err)
	}
	defer func() { _ = watcher.Close() }()
	if err := watcher.Add(filepath.Dir(w.File)); err != nil {
		return fmt.Errorf("watch %s: %w", w.File, err)
	}
	quiet := time.NewTimer(0)
	<-quiet.C
	for {
		select {
		case <-ctx.Done():
			return nil
		case event := <-watcher.Events:
			if w.concerns(event) {
				quiet.Reset(settle)
			}
		case _, open := <-watcher.Errors:
			if !open {
				return fmt.Errorf("watch %s: the watch ended", w.File)
			}
			quiet.Reset(settle) // events may be lost: look
		case <-quiet.C:
			w.Changed()
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
	return name == filepath.Base(w.File) || name == "..data"
}
