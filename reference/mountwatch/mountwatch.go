// Package mountwatch sees every mount that the host's list of mounts shows, however short.
package mountwatch

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"sync"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// Watch reads the host's list of mounts at each change, and keeps those that must not be there.
type Watch struct {
	file *os.File
	stop int
	done chan struct{}

	mu      sync.Mutex
	devices map[string]bool // by name, and by major:minor
	seen    []*mountinfo.Info
	err     error // why not all of it was seen
}

// New watches the mount namespace of this process.
func New() (*Watch, error) {
	// The thread's own list can be of another namespace; the process' is the host's.
	file, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	stop, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	w := &Watch{file: file, stop: stop, done: make(chan struct{}), devices: make(map[string]bool)}
	go w.follow()
	return w, nil
}

// Close ends the watch.
func (w *Watch) Close() error {
	_, err := unix.Write(w.stop, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	<-w.done
	return errors.Join(err, unix.Close(w.stop), w.file.Close())
}

// follow waits for changes (POLLPRI). A mount may last a millisecond: this thread must not wait for a processor.
func (w *Watch) follow() {
	defer close(w.done)
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
	// It takes precedence over all ordinary ones. If that is not allowed, short-lived mounts may be missed on a busy machine.
	_ = unix.SchedSetAttr(0, &unix.SchedAttr{
		Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 1, Flags: unix.SCHED_FLAG_RESET_ON_FORK,
	}, 0)
	fds := []unix.PollFd{
		{Fd: int32(w.file.Fd()), Events: unix.POLLPRI}, //nolint:gosec // descriptors are small
		{Fd: int32(w.stop), Events: unix.POLLIN},       //nolint:gosec // descriptors are small
	}
	for {
		_, err := unix.Poll(fds, -1)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err == nil && fds[1].Revents != 0 {
			return
		}
		w.read(err)
		if err != nil {
			return
		}
	}
}

// read reads the whole list, unless the wait for it has failed.
func (w *Watch) read(failed error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	_, err := w.file.Seek(0, io.SeekStart)
	raw, readErr := io.ReadAll(w.file)
	found, parseErr := mountinfo.GetMountsFromReader(bytes.NewReader(raw), w.others)
	w.seen = append(w.seen, found...)
	w.err = errors.Join(w.err, failed, err, readErr, parseErr)
}

// others filters out the mounts that are not of one of the devices, by number or name.
func (w *Watch) others(m *mountinfo.Info) (skip, stop bool) {
	return !w.devices[m.Source] && !w.devices[fmt.Sprintf("%d:%d", m.Major, m.Minor)], false
}

// Add names a device whose mounts are forbidden, by path or as major:minor.
func (w *Watch) Add(names ...string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, name := range names {
		w.devices[name] = true
	}
}

// Remove forgets names that were added.
func (w *Watch) Remove(names ...string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, name := range names {
		delete(w.devices, name)
	}
}

// CheckNone fails if a device was mounted on the host since the last call, or may have been while nobody watched.
func (w *Watch) CheckNone() error {
	w.read(nil)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err != nil {
		return fmt.Errorf("the host's mounts cannot be watched: %w", w.err)
	}
	seen := w.seen
	w.seen = nil
	if len(seen) == 0 {
		return nil
	}
	return fmt.Errorf("the host's mountinfo showed: %+v", *seen[0])
}
