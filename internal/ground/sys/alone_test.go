package sys

import (
	"errors"
	"net"
	"os"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
)

func isOpen(fd int) bool {
	_, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
	return err == nil
}

// hungSocket returns a socket whose last close waits until free is called, as that of a device whose cache cannot be
// written: nobody reads what was sent.
func hungSocket(t *testing.T) (fd int, free func()) {
	t.Helper()
	listener := check.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	t.Cleanup(func() { _ = listener.Close() })
	near := check.Value(net.Dial("tcp", listener.Addr().String()))(t)
	far := check.Value(listener.Accept())(t)
	tcp, ok := near.(*net.TCPConn)
	check.That(t, ok, "not a TCP connection: %T", near)
	file := check.Value(tcp.File())(t)
	check.Must(t, near.Close())
	fd, err := unix.FcntlInt(file.Fd(), unix.F_DUPFD_CLOEXEC, 3)
	check.Must(t, err)
	check.Must(t, file.Close())
	check.Must(t, unix.SetNonblock(fd, true))
	for err == nil {
		_, err = unix.Write(fd, make([]byte, 64<<10))
	}
	check.Must(t, unix.SetNonblock(fd, false)) // else close does not wait
	check.Must(t, unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1, Linger: 600}))
	return fd, func() { _ = far.Close() }
}

// TestCloseThatHangs: while it does, programs can be started and devices closed, and no program has a copy.
func TestCloseThatHangs(t *testing.T) {
	fd, free := hungSocket(t)
	ended := make(chan struct{})
	go func() {
		CloseAlone(fd)
		close(ended)
	}()
	check.Eventually(t, "the descriptor is no more", func() bool { return !isOpen(fd) })
	err := check.Until(20*time.Second, time.Millisecond, func() error {
		if !syscall.ForkLock.TryLock() {
			return errors.New("no program can be started")
		}
		syscall.ForkLock.Unlock()
		return nil
	})
	check.That(t, err == nil, "%v", err)
	select {
	case <-ended:
		t.Error("it did not hang")
	default:
	}
	free()
	<-ended
}

// TestCloseBesideAStart: a program that is being started has a copy until it runs.
func TestCloseBesideAStart(t *testing.T) {
	defer func(was time.Duration) { startTime = was }(startTime)
	startTime = time.Hour
	for _, flags := range []int{unix.O_RDONLY, unix.O_RDWR} {
		fd := check.Value(unix.Open("/dev/zero", flags|unix.O_CLOEXEC, 0))(t)
		ended := make(chan struct{})
		syscall.ForkLock.Lock()
		go func() {
			CloseFileAlone(os.NewFile(uintptr(fd), "zero"))
			close(ended)
		}()
		time.Sleep(10 * time.Millisecond) // for a close that does not wait: it is seen at times only
		check.That(t, isOpen(fd), "it was closed while a program was being started")
		syscall.ForkLock.Unlock()
		<-ended
		check.That(t, !isOpen(fd), "the descriptor is still open")
	}
	CloseFileAlone(nil)
	CloseAlone(NoFD)
}

// TestCloseBesideAStartThatHangs: the program is on storage that does not answer.
func TestCloseBesideAStartThatHangs(t *testing.T) {
	syscall.ForkLock.Lock()
	defer func() {
		syscall.ForkLock.Unlock()
		startHangs.Store(false)
	}()
	var ended atomic.Int32
	fds := make([]int, 10)
	for i := range fds {
		fds[i] = check.Value(unix.Open("/dev/zero", unix.O_CLOEXEC, 0))(t)
	}
	go func() {
		for _, fd := range fds {
			CloseAlone(fd)
			ended.Add(1)
		}
	}()
	check.Eventually(t, "all are closed", func() bool { return ended.Load() == 10 })
	check.That(t, !slices.ContainsFunc(fds, isOpen), "a descriptor is still open")
}

// TestCloseOfAnImage: its server may not answer, so it does not wait for programs that are being started, nor they for it.
func TestCloseOfAnImage(t *testing.T) {
	file := check.Value(os.Create(t.TempDir() + "/image"))(t)
	syscall.ForkLock.Lock()
	defer syscall.ForkLock.Unlock()
	ended := make(chan struct{})
	go func() {
		CloseFileAlone(file)
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(20 * time.Second):
		t.Error("an image is closed under the fork lock")
	}
}
