package projection

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"os"
	"sync"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

const (
	// For the root: new directories, and the end of the root itself.
	rootEvents = unix.IN_CREATE | unix.IN_MOVED_TO | unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_ONLYDIR
	// For our directories, which are watched before they are renamed into place. Their end is an IN_IGNORED.
	ownEvents = unix.IN_CREATE | unix.IN_MOVED_TO | unix.IN_ONLYDIR | unix.IN_DONT_FOLLOW
	// For those of other programs, which may write their file in place.
	foreignEvents = ownEvents | unix.IN_CLOSE_WRITE | unix.IN_MOVE_SELF

	// rescanEvery is how often the tree is read where it cannot be watched, and
	// rescanRetry how soon after its root vanished.
	rescanEvery = 30 * time.Second
	rescanRetry = 200 * time.Millisecond
)

// Watch follows a tree while its Run runs.
type Watch struct {
	tree  *Tree
	store *Store // handles the changes

	mu     sync.Mutex
	in     *inotify // nil while Run does not run
	rootWD int32
	byWD   map[int32]volume.Key
	byKey  map[volume.Key]int32
	failed error
	again  chan struct{}
}

// Add watches the directory of a volume. If that is gone, the error is ENOENT.
func (w *Watch) Add(key volume.Key, path string, whose Owner) error {
	events := uint32(ownEvents)
	if whose == Foreign {
		events = foreignEvents
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.in == nil {
		return nil
	}
	// The lock is held so that the first event of a watch finds it in the map.
	wd, err := w.in.add(path, events)
	if err == nil {
		delete(w.byWD, w.byKey[key]) // of a directory that is gone
		w.byWD[wd], w.byKey[key] = key, wd
	} else if !IsGone(err) {
		w.fail(err)
	}
	return err
}

// IsGone reports whether an error means that there is no such directory.
func IsGone(err error) bool { return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) }

// fail records why the tree cannot be watched, or nil. The caller holds the lock.
func (w *Watch) fail(err error) {
	if w.failed == nil && err != nil {
		w.tree.Log.Warn("the tree of volumes cannot be watched: bindings show late", zap.Error(err))
	}
	w.failed = err
}

// Has reports whether the directory of a volume is watched.
func (w *Watch) Has(key volume.Key) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	_, watched := w.byKey[key]
	return watched
}

// Forget drops the watch of a volume. Its directory is about to be removed, which ends the
// kernel's watch; the event of that is ignored.
func (w *Watch) Forget(key volume.Key) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.byWD, w.byKey[key])
	delete(w.byKey, key)
}

// Run follows the tree until ctx ends.
func (w *Watch) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	in, err := newInotify()
	w.start(in, err)
	if err == nil {
		group.Go(func() error { return in.read(ctx, w.Event) })
	}
	group.Go(func() error { w.rescans(ctx); return nil })
	err = group.Wait()
	w.start(nil, nil)
	if in != nil {
		err = errors.Join(err, in.close())
	}
	return err
}

func (w *Watch) start(in *inotify, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.in, w.rootWD = in, 0
	w.fail(err)
	clear(w.byWD)
	clear(w.byKey)
}

// rescans reads the whole tree at the start, when events were lost, when the root was
// replaced, and regularly if it cannot be watched.
func (w *Watch) rescans(ctx context.Context) {
	tick := time.NewTicker(rescanEvery)
	defer tick.Stop()
	w.scan()
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.again:
			w.scan()
		case <-tick.C:
			if w.Health() != nil {
				w.scan()
			}
		}
	}
}

// scan watches the root before the tree is listed.
func (w *Watch) scan() {
	w.mu.Lock()
	if w.in != nil {
		err := os.MkdirAll(w.tree.Root, 0o700)
		if err == nil {
			w.rootWD, err = w.in.add(w.tree.Root, rootEvents)
		}
		w.fail(err)
	}
	w.mu.Unlock()
	w.store.scan()
}

const gone = unix.IN_IGNORED | unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_UNMOUNT

// Event handles one event of the kernel.
func (w *Watch) Event(wd int32, mask uint32, name string) {
	w.mu.Lock()
	if mask&unix.IN_Q_OVERFLOW != 0 { // events of any volume can be lost: the next scan reads all directories anew
		clear(w.byWD) // the kernel gives the same numbers again
		clear(w.byKey)
	}
	key, known := w.byWD[wd]
	ofRoot := wd == w.rootWD
	w.mu.Unlock()
	switch {
	case mask&unix.IN_Q_OVERFLOW != 0:
		sys.Wake(w.again)
	case ofRoot && mask&gone != 0:
		if mask&unix.IN_IGNORED == 0 {
			time.AfterFunc(rescanRetry, func() { sys.Wake(w.again) })
		}
	case ofRoot && mask&unix.IN_ISDIR != 0:
		w.store.dirAdded(name)
	case !known:
	case mask&gone != 0:
		if w.end(wd, key) {
			w.store.dirRemoved(key)
		}
	case mask&unix.IN_ISDIR == 0:
		w.store.fileWritten(key, name)
	}
}

// end drops a watch. It returns false if a new directory of the volume is watched already.
func (w *Watch) end(wd int32, key volume.Key) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.byWD, wd)
	if w.byKey[key] != wd {
		return false
	}
	delete(w.byKey, key)
	return true
}

// Health returns what keeps the tree from being watched, or nil.
func (w *Watch) Health() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if errors.Is(w.failed, unix.ENOSPC) {
		return volume.Errorf(volume.Exhausted, "%s: the kernel has no inotify watch left, so that bindings show late: "+
			"raise the sysctl fs.inotify.max_user_watches: %w", w.tree.Name, w.failed)
	}
	if w.failed != nil {
		return volume.Errorf(volume.Internal, "%s: the tree of volumes cannot be watched, so that bindings show late: %w",
			w.tree.Name, w.failed)
	}
	return nil
}

// gather is the pause after reading events, in which more can queue up. Each of our own publishes makes two, and a
// wake-up for each would cost them a third of their time. The first event after a quiet time is read at once.
const gather = time.Millisecond

// inotify watches inodes with the kernel's interface itself: a volume's directory is watched
// before it is renamed into place, so that no sandbox id is missed, and 10,000 watches cost
// an integer each. A library that identifies watches by path can do neither.
type inotify struct {
	fd   int
	stop int // an eventfd that ends the wait for events
}

// event handles one event; name is that of the directory's entry.
type event func(wd int32, mask uint32, name string)

func newInotify() (*inotify, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, err
	}
	stop, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	return &inotify{fd: fd, stop: stop}, nil
}

func (n *inotify) close() error { return errors.Join(unix.Close(n.fd), unix.Close(n.stop)) }

func (n *inotify) add(dir string, events uint32) (int32, error) {
	wd, err := unix.InotifyAddWatch(n.fd, dir, events)
	return int32(wd), err //nolint:gosec // the kernel counts watches in an int
}

// read calls handle for each event until ctx ends.
func (n *inotify) read(ctx context.Context, handle event) error {
	ended := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		_, _ = unix.Write(n.stop, []byte{1, 0, 0, 0, 0, 0, 0, 0}) // an eventfd has room for the one
		close(ended)
	})
	defer func() {
		if !stop() {
			<-ended // the descriptor may be closed after this
		}
	}()
	buf := make([]byte, 64<<10)
	pause := time.NewTimer(gather)
	defer pause.Stop()
	for {
		err := n.wait()
		if ctx.Err() != nil {
			return nil
		}
		got := 0
		if err == nil {
			got, err = unix.Read(n.fd, buf)
		}
		if err != nil && !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) {
			return err
		}
		dispatch(buf[:max(got, 0)], handle)
		pause.Reset(gather)
		select {
		case <-ctx.Done():
			return nil
		case <-pause.C:
		}
	}
}

// wait waits for events in a system call of its own and not in Go's poller, which would be woken even during the pause.
func (n *inotify) wait() error {
	fds := []unix.PollFd{{Fd: int32(n.fd), Events: unix.POLLIN}, {Fd: int32(n.stop), Events: unix.POLLIN}} //nolint:gosec // descriptors are small
	for {
		if _, err := unix.Poll(fds, -1); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// dispatch calls handle for each event in a buffer.
func dispatch(buf []byte, handle event) {
	for len(buf) >= unix.SizeofInotifyEvent {
		wd := int32(binary.NativeEndian.Uint32(buf)) //nolint:gosec // as the kernel wrote it
		mask := binary.NativeEndian.Uint32(buf[4:])
		end := unix.SizeofInotifyEvent + int(binary.NativeEndian.Uint32(buf[12:]))
		if end > len(buf) {
			return
		}
		handle(wd, mask, string(bytes.TrimRight(buf[unix.SizeofInotifyEvent:end], "\x00")))
		buf = buf[end:]
	}
}
