package conformance

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// hostWatch reads the host's list of mounts at each change of it, and notes those
// that must not be there.
type hostWatch struct {
	file *os.File
	stop int
	done chan struct{}

	mu      sync.Mutex
	devices map[string]bool // by name, and by major:minor
	seen    []string
}

func watchHost() (*hostWatch, error) {
	// The thread's own list can be of another namespace; the process' is the host's.
	file, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	stop, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	w := &hostWatch{file: file, stop: stop, done: make(chan struct{}), devices: make(map[string]bool)}
	go w.follow()
	return w, nil
}

func (w *hostWatch) close() error {
	_, err := unix.Write(w.stop, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	<-w.done
	return errors.Join(err, unix.Close(w.stop), w.file.Close())
}

// follow waits for changes. The kernel tells of each by POLLPRI.
func (w *hostWatch) follow() {
	defer close(w.done)
	fds := []unix.PollFd{
		{Fd: int32(w.file.Fd()), Events: unix.POLLPRI}, //nolint:gosec // descriptors are small
		{Fd: int32(w.stop), Events: unix.POLLIN},       //nolint:gosec // descriptors are small
	}
	for {
		_, err := unix.Poll(fds, -1)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || fds[1].Revents != 0 {
			return
		}
		w.look()
	}
}

// look reads the whole list.
func (w *hostWatch) look() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, err := w.file.Seek(0, io.SeekStart); err != nil {
		return
	}
	raw, err := io.ReadAll(w.file)
	if err != nil {
		return
	}
	for line := range bytes.Lines(raw) {
		if w.forbidden(string(line)) {
			w.seen = append(w.seen, strings.TrimSpace(string(line)))
		}
	}
}

// forbidden tells a mount of one of the devices, by its number or by its name.
func (w *hostWatch) forbidden(line string) bool {
	fields := strings.Fields(line)
	if len(fields) < 7 {
		return false
	}
	if w.devices[fields[2]] {
		return true
	}
	_, tail, _ := strings.Cut(line, " - ")
	of := strings.Fields(tail)
	return len(of) > 1 && w.devices[of[1]]
}

// add has the mounts of a device noted.
func (w *hostWatch) add(names ...string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, name := range names {
		w.devices[name] = true
	}
}

func (w *hostWatch) remove(names ...string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, name := range names {
		delete(w.devices, name)
	}
}

// none fails where a filesystem of a volume was ever mounted on the host.
func (w *hostWatch) none() error {
	w.look()
	w.mu.Lock()
	defer w.mu.Unlock()
	seen := w.seen
	w.seen = nil
	if len(seen) == 0 {
		return nil
	}
	return fmt.Errorf("the host's mountinfo showed: %s", seen[0])
}
