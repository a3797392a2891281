package config

import (
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestWatcherSeesEveryWayToChangeAFile: also what inotify would not report.
func TestWatcherSeesEveryWayToChangeAFile(t *testing.T) {
	dir, elsewhere := filepath.Join(t.TempDir(), "etc"), t.TempDir()
	file, target := filepath.Join(dir, "config.yaml"), filepath.Join(elsewhere, "shared.yaml")
	must := func(err error) {
		t.Helper()
		check.Must(t, err)
	}
	length := 0
	write := func(path string) { // another length each time: two changes may share a time
		t.Helper()
		length++
		must(os.WriteFile(path, make([]byte, length), 0o600))
	}
	must(os.Mkdir(dir, 0o700))
	write(file)
	write(target)
	synctest.Test(t, func(t *testing.T) {
		watcher, signals := Watch(file), make(chan os.Signal)
		var changes atomic.Int32
		write(file) // between the watch and the call of Run, as while the daemon starts
		go func() { _ = watcher.Run(t.Context(), signals, func() { changes.Add(1) }) }()
		time.Sleep(watchEvery / 2) // changes come between two looks, not at the moment of one
		for _, step := range []struct {
			name   string
			change func()
			want   int32
		}{
			{"a change before Run", func() {}, 1},
			{"no change", func() {}, 0},
			{"a signal", func() { signals <- syscall.SIGHUP }, 1},
			{"a change and a signal", func() { write(file); signals <- syscall.SIGHUP }, 1},
			{"written in place", func() { write(file) }, 1},
			{"written in two steps", func() { write(file); time.Sleep(quiet / 2); write(file) }, 1},
			{"touched all the time", func() {
				for range watchEvery/quiet + mostChanging + 2 {
					write(file)
					time.Sleep(quiet)
				}
			}, 2},
			{"renamed over", func() { write(file + ".new"); must(os.Rename(file+".new", file)) }, 1},
			{"the directory removed", func() { must(os.RemoveAll(dir)) }, 1},
			{"the directory made anew", func() { must(os.Mkdir(dir, 0o700)); write(file) }, 1},
			{"a link in the file's place", func() { must(os.Remove(file)); must(os.Symlink(target, file)) }, 1},
			{"the target of the link", func() { write(target) }, 1},
		} {
			changes.Store(0)
			step.change()
			time.Sleep(5 * watchEvery)
			synctest.Wait()
			got := changes.Load()
			check.That(t, got == step.want, "%s: %d changes were reported, want %d", step.name, got, step.want)
		}
	})
}
