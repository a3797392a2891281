package registry

import (
	"github.com/fsnotify/fsnotify"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// notice reports that entries came or went in a directory or below it, so that this need not be read
// each second. It can miss changes, so the directory is also read from time to time.
type notice struct {
	changed chan<- struct{}
	watcher *fsnotify.Watcher // nil where the kernel has no inotify instance left
}

func newNotice(changed chan<- struct{}) *notice {
	n := &notice{changed: changed}
	if watcher, err := fsnotify.NewWatcher(); err == nil {
		n.watcher = watcher
		go n.run()
	}
	return n
}

func (n *notice) run() {
	const entries = fsnotify.Create | fsnotify.Remove | fsnotify.Rename
	for {
		select {
		case event, open := <-n.watcher.Events:
			if !open {
				return
			}
			if event.Op&entries != 0 {
				sys.Wake(n.changed)
			}
		case _, open := <-n.watcher.Errors: // events were lost
			if !open {
				return
			}
			sys.Wake(n.changed)
		}
	}
}

// watch watches a directory, and reports whether it could. It has to be called before the directory
// is read, and again if that was made anew. Where the directory hangs, so do all later calls, and close.
func (n *notice) watch(dir string) bool {
	return n != nil && n.watcher != nil && n.watcher.Add(dir) == nil
}

func (n *notice) close() {
	if n.watcher != nil {
		_ = n.watcher.Close()
	}
}
