package kata

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
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

// conn is a connection to a shim's management server. It speaks just enough
// HTTP/1.1 itself: net/http's client would cost several goroutine switches a
// call, and would not stop at a header limit of ours.
type conn struct {
	net.Conn
	left int // how many more bytes are read
}

type reply struct {
	status int
	body   []byte
}

// dial connects to a shim. It waits for a shim whose queue of connections is full: that one
// is alive.
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
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if !errors.Is(err, unix.EAGAIN) {
			return nil, err
		}
		if !sys.Sleep(ctx, wait) {
			return nil, ctx.Err()
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

// ask sends one request to a sandbox and reads the answer, whatever its status. It closes the
// connection: kubelet's next poll comes after a minute or more, so that keeping it is not worth a pool.
func (c *conn) ask(ctx context.Context, v *volume.Volume, id string, request []byte) (reply, error) {
	defer context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })()
	rep, err := c.exchange(request)
	c.close()
	if err != nil {
		return reply{}, exchangeError(ctx, v, id, err)
	}
	return rep, nil
}

func (c *conn) exchange(request []byte) (reply, error) {
	if _, err := c.Write(request); err != nil {
		return reply{}, hungUp(err)
	}
	c.left = maxHeader
	reader := bufio.NewReader(c)
	if _, err := reader.Peek(1); err != nil {
		return reply{}, hungUp(err)
	}
	return c.read(reader)
}

// hungUp is the error of a connection that ended without an answer, with its cause if that
// is not just the end.
func hungUp(err error) error {
	if errors.Is(err, io.EOF) {
		return errHungUp
	}
	return fmt.Errorf("%w: %w", errHungUp, err)
}

func (c *conn) read(reader *bufio.Reader) (reply, error) {
	response, err := http.ReadResponse(reader, nil)
	if err != nil {
		return reply{}, brokeOff(err, errNotHTTP)
	}
	defer func() {
		c.left = 0 // Close reads what is left of the body, and may not wait for it
		_ = response.Body.Close()
	}()
	if response.ContentLength > maxBody {
		return reply{}, errTooMuch
	}
	c.left = maxBody + maxHeader // chunks have headers of their own
	body := bytes.NewBuffer(make([]byte, 0, max(response.ContentLength, 0)+bytes.MinRead))
	n, err := body.ReadFrom(io.LimitReader(response.Body, maxBody+1))
	if n > maxBody {
		err = errTooMuch
	}
	if err != nil {
		return reply{}, brokeOff(err, errCutShort)
	}
	return reply{status: response.StatusCode, body: body.Bytes()}, nil
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
