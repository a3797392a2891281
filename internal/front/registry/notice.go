package registry

import "github.com/fsnotify/fsnotify"

// notice reports that entries came or went in directories, so that these need not be read each
// second. It can miss changes, so the directories are also read from time to time.
type notice struct {
	changed chan struct{}
	watcher *fsnotify.Watcher // nil before begin, and where the kernel has no inotify instance left
	ended   chan struct{}
}

func newNotice() *notice { return &notice{changed: make(chan struct{}, 1), ended: make(chan struct{})} }

func (n *notice) begin() {
	if watcher, err := fsnotify.NewWatcher(); err == nil {
		n.watcher = watcher
		go n.run()
	}
}

func (n *notice) run() {
	defer close(n.ended)
	const entries = fsnotify.Create | fsnotify.Remove | fsnotify.Rename
	for {
		select {
		case event, open := <-n.watcher.Events:
			if !open {
				return
			}
			if event.Op&entries != 0 {
				n.ring()
			}
		case _, open := <-n.watcher.Errors: // events were lost
			if !open {
				return
			}
			n.ring()
		}
	}
}

// ring has the directories read soon, for whatever reason.
func (n *notice) ring() { signal(n.changed) }

// watch watches a directory, and reports whether it could. It has to be called before the directory
// is read, and again if that was made anew.
func (n *notice) watch(dir string) bool { return n.watcher != nil && n.watcher.Add(dir) == nil }

func (n *notice) close() {
	if n.watcher != nil {
		_ = n.watcher.Close()
		<-n.ended
	}
}

// signal leaves one message in a channel that has room for one.
func signal(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default: // it is pending already
	}
}
