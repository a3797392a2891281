package config

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"
)

func TestWatcherSeesEveryWayToChangeAFile(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "config.yaml")
	write(t, file)
	watcher := Watch(file)
	if err := watcher.Err(); err != nil {
		t.Fatal(err)
	}
	watcher.every = time.Hour // so that only events count
	write(t, file)            // between the watch and the call of Run, as while the daemon starts
	seen := follow(t, watcher)
	seen("a change before Run")
	for name, change := range map[string]func(){
		"written in place": func() { write(t, file) },
		"renamed over":     func() { write(t, file+".new"); _ = os.Rename(file+".new", file) },
		"ConfigMap swap":   func() { _ = os.Symlink("x", filepath.Join(dir, "..data")) },
	} {
		change()
		seen(name)
	}
}

// TestWatcherSeesWhatRaisesNoEvent: a new directory under the old name, the target of a link
// to another directory, and every change where the kernel has no inotify instance left.
func TestWatcherSeesWhatRaisesNoEvent(t *testing.T) {
	dir, elsewhere := filepath.Join(t.TempDir(), "etc"), filepath.Join(t.TempDir(), "shared.yaml")
	file := filepath.Join(dir, "config.yaml")
	mkdir := func() {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	mkdir()
	write(t, file)
	watcher := Watch(file)
	watcher.every = time.Millisecond
	seen := follow(t, watcher)
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	seen("a directory that is removed")
	mkdir()
	write(t, file)
	seen("the directory made anew")
	write(t, file)
	seen("a file in the new directory")
	write(t, elsewhere)
	if err := errors.Join(os.Remove(file), os.Symlink(elsewhere, file)); err != nil {
		t.Fatal(err)
	}
	seen("a link in the file's place")
	write(t, elsewhere)
	seen("the target of the link")

	blind := &Watcher{file: elsewhere, every: time.Millisecond, err: errors.New("too many open files"), seen: stateOf(elsewhere)}
	seen = follow(t, blind)
	write(t, elsewhere)
	seen("a file without a watch")
}

// write writes a file of another length each time: two changes may share a time.
func write(t *testing.T, path string) {
	t.Helper()
	before, _ := os.ReadFile(path)
	if err := os.WriteFile(path, append(before, "# more\n"...), 0o600); err != nil {
		t.Fatal(err)
	}
}

// follow runs a watcher until the end of the test, and returns a function that waits for a change.
func follow(t *testing.T, watcher *Watcher) (seen func(what string)) {
	t.Helper()
	changed := make(chan struct{}, 16)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- watcher.Run(ctx, func() { changed <- struct{}{} }) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return func(what string) {
		t.Helper()
		select {
		case <-changed:
		case <-time.After(20 * time.Second):
			t.Errorf("%s: not seen", what)
		}
	}
}
