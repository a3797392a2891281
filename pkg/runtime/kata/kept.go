package kata

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	maxKept = 512
	keptFor = time.Minute
)

// kept keeps connections to shims between calls, one for each socket, so that kubelet's
// regular calls for stats need not dial each time. It keeps none unless run runs, so that
// none is left behind.
type kept struct {
	mu    sync.Mutex
	conns map[string]*conn // by socket; nil where none is kept
}

// run lets connections be kept until ctx ends.
func (k *kept) run(ctx context.Context) {
	k.mu.Lock()
	k.conns = make(map[string]*conn)
	k.mu.Unlock()
	<-ctx.Done()
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, c := range k.conns {
		c.expiry.Stop()
		c.close()
	}
	k.conns = nil
}

// take returns the kept connection to a socket, if the shim has not closed it meanwhile.
func (k *kept) take(socket string) *conn {
	c := k.remove(socket, nil)
	if c == nil || !c.expiry.Stop() {
		return nil // none, or one that is being closed
	}
	if !c.isQuiet() {
		c.close()
		return nil
	}
	return c
}

// put keeps a connection whose last answer was read to its end.
func (k *kept) put(c *conn) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.conns == nil || len(k.conns) >= maxKept || k.conns[c.socket] != nil {
		c.close()
		return
	}
	c.expiry = time.AfterFunc(keptFor, func() {
		k.remove(c.socket, c)
		c.close()
	})
	k.conns[c.socket] = c
}

// remove removes and returns the connection to a socket. If only is not nil, it removes no
// other one.
func (k *kept) remove(socket string, only *conn) *conn {
	k.mu.Lock()
	defer k.mu.Unlock()
	c := k.conns[socket]
	if c == nil || only != nil && c != only {
		return nil
	}
	delete(k.conns, socket)
	return c
}

// isQuiet reports whether the other side has neither closed the connection nor sent anything
// unasked.
func (c *conn) isQuiet() bool {
	socket, ok := c.Conn.(*net.UnixConn)
	if !ok {
		return false
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return false
	}
	quiet := false
	err = raw.Control(func(fd uintptr) {
		_, _, err := unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK|unix.MSG_DONTWAIT)
		quiet = errors.Is(err, unix.EAGAIN)
	})
	return err == nil && quiet
}
