package driver

import (
	"bytes"
	"context"
	"fmt"
	"io"
)

const (
	// compareStep is how much of each image is read at once: as many blocks as step.changed
	// has bits.
	compareStep = 64 * sizeGrain
	// comparedAtOnce is how many steps all streams together read at the same time.
	comparedAtOnce = 4
	// knownAhead is how many steps of a stream may wait for earlier ones, or for the client.
	knownAhead = 64
)

// buffers hold a step of both images.
type buffers struct{ was, is [compareStep]byte }

// newBuffers makes the buffers that all streams share. A step is read when one is free.
func newBuffers() chan *buffers {
	free := make(chan *buffers, comparedAtOnce)
	for range comparedAtOnce {
		free <- new(buffers)
	}
	return free
}

// comparison finds what has changed between two images. It reads several steps at the same
// time, but reports in order.
type comparison struct {
	base, target io.ReaderAt
	free         chan *buffers
}

// step is a range that is known to have changed, or that is being read.
type step struct {
	from, to int64
	read     chan struct{} // closed when the step has been read; nil: it is known to have changed
	changed  uint64        // a bit for each of its blocks
	err      error
}

// run reports the changed blocks of a range. When it returns, all reads have ended.
func (c *comparison) run(ctx context.Context, w walk, before, after layout) error {
	var ahead []*step // in order, of those that are not reported yet
	defer func() {
		for _, s := range ahead {
			s.wait()
		}
	}()
	reportFirst := func() error {
		first := ahead[0]
		first.wait()
		ahead = ahead[1:]
		return first.report(w.report)
	}
	// If the client does not read, no further steps are added.
	add := func(s *step) error {
		ahead = append(ahead, s)
		if len(ahead) > knownAhead {
			return reportFirst()
		}
		return nil
	}
	all := w
	all.report = func(from, to int64) error { return add(&step{from: from, to: to}) }
	err := all.changed(before, after, func(part walk, before, after piece) error {
		return c.compare(ctx, part, before.content, after.content, add)
	})
	for err == nil && len(ahead) > 0 {
		err = reportFirst()
	}
	return err
}

// compare starts to read the steps of a range, each when a buffer is free.
func (c *comparison) compare(ctx context.Context, w walk, before, after content, add func(*step) error) error {
	for at := w.from; at < w.to; {
		if err := w.alive(); err != nil {
			return err
		}
		s := &step{from: at, to: min((at/compareStep+1)*compareStep, w.to), read: make(chan struct{})}
		select {
		case b := <-c.free:
			go func() {
				defer close(s.read)
				s.err = c.compareBlocks(b, s, before, after)
				c.free <- b
			}()
		case <-ctx.Done():
			return ctx.Err()
		}
		if err := add(s); err != nil {
			return err
		}
		at = s.to
	}
	return nil
}

// wait waits until the step has been read.
func (s *step) wait() {
	if s.read != nil {
		<-s.read
	}
}

// compareBlocks compares the blocks of a step in both images. Holes are not read.
func (c *comparison) compareBlocks(b *buffers, s *step, before, after content) error {
	was, is := b.was[:s.to-s.from], b.is[:s.to-s.from]
	if err := readPart(c.base, before, was, s.from); err != nil {
		return err
	}
	if err := readPart(c.target, after, is, s.from); err != nil {
		return err
	}
	if bytes.Equal(was, is) {
		return nil
	}
	s.eachBlock(func(from, to int64, bit uint64) {
		if !bytes.Equal(was[from-s.from:to-s.from], is[from-s.from:to-s.from]) {
			s.changed |= bit
		}
	})
	return nil
}

func readPart(image io.ReaderAt, kind content, into []byte, at int64) error {
	if kind == zeros {
		clear(into)
		return nil
	}
	if n, err := image.ReadAt(into, at); n < len(into) {
		return fmt.Errorf("read an image at byte %d: %w", at+int64(n), err)
	}
	return nil
}

// eachBlock calls block for the blocks of a step; the first and the last may be partial.
func (s *step) eachBlock(block func(from, to int64, bit uint64)) {
	for from, bit := s.from, uint64(1); from < s.to; bit <<= 1 {
		to := min((from/sizeGrain+1)*sizeGrain, s.to)
		block(from, to, bit)
		from = to
	}
}

func (s *step) report(changed func(from, to int64) error) (err error) {
	if s.read == nil {
		return changed(s.from, s.to)
	}
	if s.err != nil || s.changed == 0 {
		return s.err
	}
	s.eachBlock(func(from, to int64, bit uint64) {
		if err == nil && s.changed&bit != 0 {
			err = changed(from, to)
		}
	})
	return err
}
