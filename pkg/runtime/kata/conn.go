package kata

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/guest"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

const (
	maxHeader = 16 << 10
	maxBody   = 64 << 10
)

var (
	errHungUp   = errors.New("the connection was closed without an answer")
	errTooMuch  = errors.New("the answer is larger than the limit")
	errNotHTTP  = errors.New("the answer is not HTTP")
	errCutShort = errors.New("the answer ends before its length")
)

// conn is a connection to a shim's management server. It speaks just enough HTTP/1.1 itself: net/http's client would
// cost several goroutine switches a call, and would not stop at a header limit of ours.
type conn struct {
	net.Conn
	left int // how many more bytes are read
	kept *kept
	// socket and since are for kept.
	socket string
	since  time.Time
}

type reply struct {
	status int
	body   []byte
}

// dial connects to a shim. It waits for a shim whose queue of connections is full: that one is alive.
func dial(ctx context.Context, socket string) (*conn, error) {
	var dialer net.Dialer
	for wait := time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
		raw, err := dialer.DialContext(ctx, "unix", socket)
		if err == nil {
			return &conn{Conn: raw}, nil
		}
		if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded) {
			<-ctx.Done() // the dialer's own timer, which has ctx's deadline, can fire just before that of ctx
		}
		if !errors.Is(err, unix.EAGAIN) || !sys.Sleep(ctx, wait) {
			return nil, cmp.Or(ctx.Err(), err)
		}
	}
}

// Read stops at the limit: a guest may control its process on the host.
func (c *conn) Read(p []byte) (int, error) {
	if c.left <= 0 {
		return 0, errTooMuch
	}
	n, err := c.Conn.Read(p[:min(len(p), c.left)])
	c.left -= n
	return n, err
}

func (c *conn) close() { _ = c.Close() }

// ask sends one request to a sandbox and reads the answer, whatever its status. It keeps or closes
// the connection, which the caller must not use any more.
func (c *conn) ask(ctx context.Context, v *volume.Volume, id string, request []byte) (reply, error) {
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	rep, reusable, err := c.exchange(request)
	if stop() && reusable {
		c.kept.put(c)
	} else {
		c.close()
	}
	if err != nil {
		return reply{}, exchangeError(ctx, v, id, err)
	}
	return rep, nil
}

// exchange also reports whether another request can be sent.
func (c *conn) exchange(request []byte) (rep reply, reusable bool, err error) {
	if _, err := c.Write(request); err != nil {
		return reply{}, false, hungUp(err)
	}
	c.left = maxHeader
	reader := bufio.NewReader(c)
	if _, err := reader.Peek(1); err != nil {
		return reply{}, false, hungUp(err)
	}
	return c.read(reader)
}

// hungUp is the error of a connection that ended without an answer, with its cause if that is not just the end.
func hungUp(err error) error {
	if errors.Is(err, io.EOF) {
		return errHungUp
	}
	return fmt.Errorf("%w: %w", errHungUp, err)
}

func (c *conn) read(reader *bufio.Reader) (rep reply, reusable bool, err error) {
	response, err := http.ReadResponse(reader, nil)
	if err != nil {
		return reply{}, false, brokeOff(err, errNotHTTP)
	}
	defer func() {
		c.left = 0 // Close reads what is left of the body, and may not wait for it
		_ = response.Body.Close()
	}()
	if response.ContentLength > maxBody {
		return reply{}, false, errTooMuch
	}
	c.left = maxBody + maxHeader // chunks have headers of their own
	body := bytes.NewBuffer(make([]byte, 0, max(response.ContentLength, 0)+bytes.MinRead))
	n, err := body.ReadFrom(io.LimitReader(response.Body, maxBody+1))
	if n > maxBody {
		err = errTooMuch
	}
	if err != nil {
		return reply{}, false, brokeOff(err, errCutShort)
	}
	return reply{status: response.StatusCode, body: body.Bytes()}, !response.Close && reader.Buffered() == 0, nil
}

// brokeOff classifies what ended an answer: as other if nothing else fits.
func brokeOff(err, other error) error {
	switch {
	case errors.Is(err, errTooMuch):
		return errTooMuch
	case errors.Is(err, io.ErrUnexpectedEOF):
		return errCutShort
	}
	return fmt.Errorf("%w: %w", other, err)
}

func contextError(v *volume.Volume, sandbox string, err error) error {
	return guest.ContextError(v, "Kata sandbox "+sandbox, err)
}

const (
	maxKept = 512
	// keptFor is more than the two minutes that kubelet may leave between two questions.
	keptFor = 3 * time.Minute
)

// kept keeps a connection to each shim between calls. It keeps none unless run runs, so that none is left behind.
type kept struct {
	mu    sync.Mutex
	conns map[string]*conn // by socket; nil where none is kept
}

// run lets connections be kept until ctx ends.
func (k *kept) run(ctx context.Context) {
	k.mu.Lock()
	k.conns = make(map[string]*conn)
	k.mu.Unlock()
	for sys.Sleep(ctx, keptFor/3) {
		k.closeUntil(time.Now().Add(-keptFor))
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, c := range k.conns {
		c.close()
	}
	k.conns = nil
}

// closeUntil closes the connections that nobody has used since then.
func (k *kept) closeUntil(then time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for socket, c := range k.conns {
		if !c.since.After(then) {
			c.close()
			delete(k.conns, socket)
		}
	}
}

// dial returns the kept connection to a socket, if the shim has not closed it meanwhile, or a new one.
func (k *kept) dial(ctx context.Context, socket string) (*conn, error) {
	k.mu.Lock()
	c := k.conns[socket]
	delete(k.conns, socket)
	k.mu.Unlock()
	if c != nil && c.isQuiet() {
		return c, nil
	}
	if c != nil {
		c.close()
	}
	c, err := dial(ctx, socket)
	if err == nil {
		c.kept, c.socket = k, socket
	}
	return c, err
}

// put keeps a connection whose last answer was read to its end.
func (k *kept) put(c *conn) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.conns == nil || len(k.conns) >= maxKept || k.conns[c.socket] != nil {
		c.close()
		return
	}
	c.since = time.Now()
	k.conns[c.socket] = c
}

// isQuiet reports whether the other side has neither closed the connection nor sent anything unasked.
func (c *conn) isQuiet() bool {
	socket, ok := c.Conn.(*net.UnixConn)
	return ok && errors.Is(sys.OnFD(socket, func(fd int) error {
		_, _, err := unix.Recvfrom(fd, make([]byte, 1), unix.MSG_PEEK|unix.MSG_DONTWAIT)
		return err
	}), unix.EAGAIN)
}
