package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"
)

// writeTime bounds a write to the guest: one that does not read its port would hold
// every call up.
const writeTime = 20 * time.Second

// ErrBroken is a guest that does not keep to the wire. Its connection is closed.
var ErrBroken = errors.New("the guest does not keep to the wire")

// guarded is the host's connection to a guest. It follows the frames of ttrpc in both
// directions and ends when the guest sends one that nobody asked for, or a long one.
type guarded struct {
	net.Conn
	out, in frames

	mu      sync.Mutex
	pending map[uint32]bool // the requests without an answer
}

func guard(conn net.Conn) *guarded {
	g := &guarded{Conn: conn, pending: make(map[uint32]bool)}
	g.out.begins, g.in.begins = g.asked, g.answered
	return g
}

// Write is called by one goroutine at a time, as ttrpc does.
func (g *guarded) Write(p []byte) (int, error) {
	err := g.out.follow(p)
	if err == nil {
		err = g.SetWriteDeadline(time.Now().Add(writeTime))
	}
	if err != nil {
		return 0, err
	}
	n, err := g.Conn.Write(p)
	if err != nil {
		// What was written of a frame cannot be taken back.
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

func (g *guarded) asked(_, stream uint32, kind byte) error {
	if kind != typeRequest {
		return fmt.Errorf("a frame of type %d is not sent on this wire", kind)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.pending[stream] = true
	return nil
}

func (g *guarded) answered(length, stream uint32, kind byte) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case length > MaxFrame:
		return fmt.Errorf("%w: a frame of %d bytes", ErrBroken, length)
	case kind != typeResponse:
		return fmt.Errorf("%w: a frame of type %d", ErrBroken, kind)
	case !g.pending[stream]:
		return fmt.Errorf("%w: an answer that nobody asked for", ErrBroken)
	}
	delete(g.pending, stream)
	return nil
}

// frames follows a stream of bytes from frame to frame.
type frames struct {
	begins func(length, stream uint32, kind byte) error

	header [headerSize]byte
	have   int    // bytes of the header
	left   uint32 // bytes of the body that are to come
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
		if err := f.begins(f.left, binary.BigEndian.Uint32(f.header[4:8]), f.header[8]); err != nil {
			return err
		}
	}
	return nil
}
