package kata

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// Watches are set on inodes, straight through inotify: a volume's directory is
// watched before it is renamed into place, so that no sandbox id can come
// unseen, and 10,000 watches cost an integer each. A library that names watches
// by path could do neither.
const (
	// The root: directories that other programs make, and its own end.
	rootEvents = unix.IN_CREATE | unix.IN_MOVED_TO | unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_ONLYDIR
	// Our directories: sandbox ids only. Its end shows as IN_IGNORED.
	ownEvents = unix.IN_CREATE | unix.IN_MOVED_TO | unix.IN_ONLYDIR | unix.IN_DONT_FOLLOW
	// Those of other programs, which write mountInfo.json in place.
	foreignEvents = ownEvents | unix.IN_CLOSE_WRITE | unix.IN_MOVE_SELF

	// rescanEvery is how often the tree is read where it cannot be watched, and
	// rescanRetry how soon after its root vanished.
	rescanEvery = 30 * time.Second
	rescanRetry = 200 * time.Millisecond
	// gather is how long events are left to gather after some were read. Each of
	// our own publishes makes two, and to be woken for each would cost them a
	// third of their time. The first event after a rest is read at once.
	gather = time.Millisecond
)

// watch is the inotify instance of one Run. Its maps are guarded by Handler.mu.
type watch struct {
	fd     int
	stop   int // an eventfd that ends the wait for events
	root   int32
	byWD   map[int32]deferral.Key
	rescan chan struct{}
}

func newWatch() (*watch, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, err
	}
	stop, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	return &watch{fd: fd, stop: stop, byWD: make(map[int32]deferral.Key), rescan: make(chan struct{}, 1)}, nil
}

func (w *watch) close() error { return errors.Join(unix.Close(w.fd), unix.Close(w.stop)) }

// end has the wait for events end.
func (w *watch) end() error {
	_, err := unix.Write(w.stop, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	return err
}

// wait waits for events. It waits in the kernel by itself and not in the
// runtime's poller, which would be woken also while nobody wants to read.
func (w *watch) wait() error {
	fds := []unix.PollFd{{Fd: int32(w.fd), Events: unix.POLLIN}, {Fd: int32(w.stop), Events: unix.POLLIN}} //nolint:gosec // descriptors are small
	for {
		if _, err := unix.Poll(fds, -1); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// forget ends a watch. The kernel's last event for it finds nobody.
func (w *watch) forget(wd int32) {
	if w == nil || wd == 0 {
		return
	}
	delete(w.byWD, wd)
	// The directory is about to go, and the watch with it: no call is needed.
}

// askRescan has the tree read once more.
func (w *watch) askRescan() {
	select {
	case w.rescan <- struct{}{}:
	default:
	}
}

// Run watches Kata's tree and keeps connections until ctx ends.
func (h *Handler) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { h.pool.run(ctx); return nil })
	w, err := newWatch()
	if err != nil {
		h.setUnwatched(err)
		group.Go(func() error { return h.rescanLoop(ctx, nil) })
		return group.Wait()
	}
	h.setWatch(w)
	group.Go(func() error { return h.rescanLoop(ctx, w) })
	group.Go(func() error { return h.readEvents(ctx, w) })
	group.Go(func() error { <-ctx.Done(); return w.end() })
	err = group.Wait()
	h.setWatch(nil)
	return errors.Join(err, w.close())
}

func (h *Handler) setWatch(w *watch) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.watch = w
	for _, e := range h.entries {
		e.wd = 0
	}
}

func (h *Handler) setUnwatched(err error) {
	h.mu.Lock()
	first := h.unwatch == nil
	h.unwatch = err
	h.mu.Unlock()
	if first && err != nil {
		h.log.Warn("Kata's tree of volumes cannot be watched: bindings show late", zap.Error(err))
	}
}

// rescanLoop reads the whole tree at start, when events were lost, when the
// root was replaced, and now and then where there is no watch.
func (h *Handler) rescanLoop(ctx context.Context, w *watch) error {
	tick := time.NewTicker(rescanEvery)
	defer tick.Stop()
	var asked chan struct{}
	if w != nil {
		asked = w.rescan
		w.askRescan()
	} else {
		h.scan(nil)
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-asked:
			h.scan(w)
		case <-tick.C:
			if w == nil || h.isUnwatched() {
				h.scan(w)
			}
		}
	}
}

func (h *Handler) isUnwatched() bool {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return h.unwatch != nil
}

// watchRoot must come before the tree is listed.
func (h *Handler) watchRoot(w *watch) {
	if w == nil {
		return
	}
	if err := os.MkdirAll(h.cfg.DirectVolumes, 0o700); err != nil {
		h.setUnwatched(err)
		return
	}
	wd, err := unix.InotifyAddWatch(w.fd, h.cfg.DirectVolumes, rootEvents)
	if err != nil {
		h.setUnwatched(err)
		return
	}
	h.mu.Lock()
	w.root = int32(wd) //nolint:gosec // the kernel counts watches in an int
	h.mu.Unlock()
	h.setUnwatched(nil)
}

// watchNew watches a directory of ours that nobody else can reach yet.
func (h *Handler) watchNew(e *entry, dir string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.watch == nil {
		return
	}
	if err := h.addWatch(e, dir, ownEvents); err != nil {
		h.unwatch = err
	}
}

// addWatch is called with Handler.mu held, so that the first event of a watch
// finds it in the map.
func (h *Handler) addWatch(e *entry, dir string, events uint32) error {
	if h.watch == nil {
		return nil
	}
	wd, err := unix.InotifyAddWatch(h.watch.fd, dir, events)
	if err != nil {
		return err
	}
	e.wd = int32(wd) //nolint:gosec // the kernel counts watches in an int
	h.watch.byWD[e.wd] = e.key
	return nil
}

func (h *Handler) readEvents(ctx context.Context, w *watch) error {
	buf := make([]byte, 64<<10)
	pause := time.NewTimer(gather)
	defer pause.Stop()
	for {
		err := w.wait()
		if ctx.Err() != nil {
			return nil
		}
		n := 0
		if err == nil {
			n, err = unix.Read(w.fd, buf)
		}
		if err != nil && !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) {
			return deferral.Errorf(deferral.Internal, "kata: the events of the tree of volumes cannot be read: %w", err)
		}
		h.dispatch(w, buf[:max(n, 0)])
		pause.Reset(gather)
		select {
		case <-ctx.Done():
			return nil
		case <-pause.C:
		}
	}
}

// dispatch takes a buffer of events apart.
func (h *Handler) dispatch(w *watch, buf []byte) {
	for len(buf) >= unix.SizeofInotifyEvent {
		wd := int32(binary.NativeEndian.Uint32(buf)) //nolint:gosec // as the kernel wrote it
		mask := binary.NativeEndian.Uint32(buf[4:])
		end := unix.SizeofInotifyEvent + int(binary.NativeEndian.Uint32(buf[12:]))
		if end > len(buf) {
			return
		}
		name := string(bytes.TrimRight(buf[unix.SizeofInotifyEvent:end], "\x00"))
		h.event(w, wd, mask, name)
		buf = buf[end:]
	}
}

func (h *Handler) event(w *watch, wd int32, mask uint32, name string) {
	h.mu.RLock()
	key, known := w.byWD[wd]
	root := w.root
	h.mu.RUnlock()
	switch {
	case mask&unix.IN_Q_OVERFLOW != 0:
		w.askRescan()
	case wd == root:
		h.rootEvent(w, mask, name)
	case !known:
	case mask&(unix.IN_IGNORED|unix.IN_MOVE_SELF|unix.IN_UNMOUNT) != 0:
		h.vanished(key, wd)
	case mask&unix.IN_ISDIR != 0:
	case name == infoName:
		h.rewritten(key)
	case mask&(unix.IN_CREATE|unix.IN_MOVED_TO) != 0:
		h.sighted(key, name)
	}
}

func (h *Handler) rootEvent(w *watch, mask uint32, name string) {
	if mask&(unix.IN_IGNORED|unix.IN_DELETE_SELF|unix.IN_MOVE_SELF|unix.IN_UNMOUNT) != 0 {
		if mask&unix.IN_IGNORED == 0 {
			time.AfterFunc(rescanRetry, w.askRescan)
		}
		return
	}
	if mask&unix.IN_ISDIR != 0 {
		h.look(filepath.Join(h.cfg.DirectVolumes, name), name)
	}
}

// vanished forgets a directory that somebody removed. Should it have been one
// of ours, the reconciler puts it back.
func (h *Handler) vanished(key deferral.Key, wd int32) {
	h.mu.Lock()
	delete(h.watch.byWDOrNil(), wd)
	e, ok := h.entries[key]
	if !ok || e.wd != wd {
		h.mu.Unlock()
		return
	}
	delete(h.entries, key)
	delete(h.adopted, key)
	h.mu.Unlock()
	if e.live.id != "" || e.foreign != "" {
		h.changed(key)
	}
}

func (w *watch) byWDOrNil() map[int32]deferral.Key {
	if w == nil {
		return nil
	}
	return w.byWD
}
