package tree

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"time"

	"golang.org/x/sys/unix"
)

// gather is the pause after reading events, in which more can queue up. Each of our own
// publishes makes two, and a wake-up for each would cost them a third of their time. The
// first event after a quiet time is read at once.
const gather = time.Millisecond

// Inotify watches inodes with the kernel's interface itself: a volume's directory is watched
// before it is renamed into place, so that no sandbox id is missed, and 10,000 watches cost
// an integer each. A library that identifies watches by path can do neither.
type Inotify struct {
	fd   int
	stop int // an eventfd that ends the wait for events
}

// Event handles one event; name is that of the directory's entry.
type Event func(wd int32, mask uint32, name string)

// NewInotify opens an instance.
func NewInotify() (*Inotify, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, err
	}
	stop, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	return &Inotify{fd: fd, stop: stop}, nil
}

// Close ends all watches.
func (n *Inotify) Close() error { return errors.Join(unix.Close(n.fd), unix.Close(n.stop)) }

// Add watches a directory.
func (n *Inotify) Add(dir string, events uint32) (int32, error) {
	wd, err := unix.InotifyAddWatch(n.fd, dir, events)
	return int32(wd), err //nolint:gosec // the kernel counts watches in an int
}

// Read calls handle for each event until ctx ends.
func (n *Inotify) Read(ctx context.Context, handle Event) error {
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
		Dispatch(buf[:max(got, 0)], handle)
		pause.Reset(gather)
		select {
		case <-ctx.Done():
			return nil
		case <-pause.C:
		}
	}
}

// wait waits for events in a system call of its own and not in Go's poller, which would be
// woken even during the pause.
func (n *Inotify) wait() error {
	fds := []unix.PollFd{{Fd: int32(n.fd), Events: unix.POLLIN}, {Fd: int32(n.stop), Events: unix.POLLIN}} //nolint:gosec // descriptors are small
	for {
		if _, err := unix.Poll(fds, -1); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// Dispatch calls handle for each event in a buffer.
func Dispatch(buf []byte, handle Event) {
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
