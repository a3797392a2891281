package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"
)

// writeTimeout bounds a write: a guest that does not read its port would block every call.
const writeTimeout = 20 * time.Second

// ErrBroken means that the guest broke the protocol. Its connection is closed.
var ErrBroken = errors.New("the guest broke the wire protocol")

// guarded is the host's connection to a guest. It parses the headers of ttrpc's frames in both
// directions, and closes when the guest sends an oversized frame, or one without a request.
type guarded struct {
	net.Conn
	out, in frames

	mu      sync.Mutex
	pending map[uint32]bool // the streams of requests without a response
}

func guard(conn net.Conn) *guarded {
	g := &guarded{Conn: conn, pending: make(map[uint32]bool)}
	g.out.onFrame, g.in.onFrame = g.onRequest, g.onResponse
	return g
}

// Write must not be called concurrently; ttrpc does not.
func (g *guarded) Write(p []byte) (int, error) {
	err := g.out.follow(p)
	if err == nil {
		err = g.SetWriteDeadline(time.Now().Add(writeTimeout))
	}
	if err != nil {
		return 0, err
	}
	n, err := g.Conn.Write(p)
	if err != nil {
		// A part of the frame may have been sent.
		_ = g.Close()
	}
	return n, err
}

func (g *guarded) Read(p []byte) (int, error) {
	n, err := g.Conn.Read(p)
	if bad := g.in.follow(p[:n]); bad != nil {
		_ = g.Close()
		return 0, bad
	}
	return n, err
}

// A ttrpc frame begins with its length, its stream, its type and flags.
const (
	headerSize   = 10
	typeRequest  = 1
	typeResponse = 2
)

func (g *guarded) onRequest(_, stream uint32, kind byte) error {
	if kind != typeRequest {
		return fmt.Errorf("a frame of type %d is not sent on this wire", kind)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.pending[stream] = true
	return nil
}

func (g *guarded) onResponse(length, stream uint32, kind byte) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case length > MaxFrame:
		return fmt.Errorf("%w: a frame of %d bytes", ErrBroken, length)
	case kind != typeResponse:
		return fmt.Errorf("%w: a frame of type %d", ErrBroken, kind)
	case !g.pending[stream]:
		return fmt.Errorf("%w: a response without a request", ErrBroken)
	}
	delete(g.pending, stream)
	return nil
}

// frames parses a byte stream and calls onFrame at each frame header.
type frames struct {
	onFrame func(length, stream uint32, kind byte) error

	header [headerSize]byte
	have   int    // bytes of the header so far
	left   uint32 // bytes of the body that follow
}

func (f *frames) follow(p []byte) error {
	for len(p) > 0 {
		if f.left > 0 {
			n := min(f.left, uint32(len(p))) //nolint:gosec // buffers are small
			f.left -= n
			p = p[n:]
			continue
		}
		n := copy(f.header[f.have:], p)
		f.have += n
		p = p[n:]
		if f.have < headerSize {
			continue
		}
		f.have = 0
		f.left = binary.BigEndian.Uint32(f.header[0:4])
		if err := f.onFrame(f.left, binary.BigEndian.Uint32(f.header[4:8]), f.header[8]); err != nil {
			return err
		}
	}
	return nil
}
