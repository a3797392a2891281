package wire

import (
	"encoding/binary"
	"errors"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// FuzzFrames: however a guest's bytes are cut into reads, the same answers are let through: those to what was asked,
// once each and not too long, up to the first that is none.
func FuzzFrames(f *testing.F) {
	body := make([]byte, 20)
	good := append(frame(1, typeResponse, body), frame(5, typeResponse, nil)...)
	f.Add(good, byte(3))
	f.Add(append(good, frame(1, typeResponse, body)...), byte(0))
	f.Add(frame(1, typeRequest, body), byte(9))
	f.Add(frame(2, typeResponse, body)[:headerSize], byte(10))
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 0, 0, 0, 1, typeResponse, 0}, byte(1))
	f.Fuzz(func(t *testing.T, raw []byte, size byte) {
		asked := []uint32{1, 3, 5}
		wanted, whole := answers(raw, asked)
		g := guard(nil)
		for _, stream := range asked {
			check.Must(t, g.out.follow(frame(stream, typeRequest, body)))
		}
		var err error
		for rest := raw; err == nil && len(rest) > 0; {
			n := min(int(size)+1, len(rest))
			err = g.in.follow(rest[:n])
			rest = rest[n:]
		}
		check.Require(t, whole == (err == nil) && (err == nil || errors.Is(err, ErrBroken)), "whole: %v, and the follower says %v", whole, err)
		taken := len(asked) - len(g.pending)
		check.Require(t, taken == wanted, "%d answers were let through, and %d are right", taken, wanted)
	})
}

// answers reads frames from a whole, and counts those that may be let through.
func answers(raw []byte, asked []uint32) (n int, whole bool) {
	open := make(map[uint32]bool)
	for _, stream := range asked {
		open[stream] = true
	}
	for len(raw) >= headerSize {
		length, stream := binary.BigEndian.Uint32(raw), binary.BigEndian.Uint32(raw[4:])
		if length > MaxFrame || raw[8] != typeResponse || !open[stream] {
			return n, false
		}
		delete(open, stream)
		n++
		raw = raw[min(headerSize+int(length), len(raw)):]
	}
	return n, true
}
