package kubelet

import (
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"
)

// run takes events as they come and reconciles now and then.
func (k *Kubelet) run(ctx context.Context, watcher *fsnotify.Watcher) {
	tick := time.NewTicker(k.interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case event := <-watcher.Events:
			k.take(watcher, event)
		case err := <-watcher.Errors:
			k.note(Event{Kind: Lost, Error: err.Error()})
		case <-tick.C:
			k.reconcile(ctx)
		}
	}
}

// watch adds a directory with everything below. What is there already counts as just made.
func (k *Kubelet) watch(watcher *fsnotify.Watcher, dir string) {
	_ = filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil: // gone meanwhile
		case entry.IsDir():
			_ = watcher.Add(path)
		case entry.Type() == fs.ModeSocket && !strings.HasPrefix(entry.Name(), "."):
			k.want(path)
		}
		return nil
	})
}

func (k *Kubelet) take(watcher *fsnotify.Watcher, event fsnotify.Event) {
	switch {
	case event.Has(fsnotify.Create):
		info, err := os.Stat(event.Name)
		switch {
		case err != nil || strings.HasPrefix(filepath.Base(event.Name), "."):
		case info.IsDir():
			k.watch(watcher, event.Name)
		case info.Mode().Type() == fs.ModeSocket:
			k.want(event.Name)
		}
	case event.Has(fsnotify.Remove):
		k.locked(func() { delete(k.desired, event.Name) })
	}
}

// want takes a socket for new, also one that it knew.
func (k *Kubelet) want(path string) { k.locked(func() { k.desired[path] = time.Now() }) }
