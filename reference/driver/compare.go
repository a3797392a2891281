package driver

import (
	"bytes"
	"context"
	"fmt"
	"io"
)

const (
	// compareStep is how much of each image is read at once: a step has as many blocks as
	// its answer has bits.
	compareStep = 64 * sizeGrain
	// comparedAtOnce is how many steps all streams together read at a time.
	comparedAtOnce = 4
	// knownAhead is how many answers of a stream wait for those before them, or for a client.
	knownAhead = 64
)

// buffers are what a step of both images is read into.
type buffers struct{ was, is [compareStep]byte }

// newBuffers makes those that all streams share. Who has one may read.
func newBuffers() chan *buffers {
	free := make(chan *buffers, comparedAtOnce)
	for range comparedAtOnce {
		free <- new(buffers)
	}
	return free
}

// comparison finds what has changed between two images. It reads several steps at a time
// where it has to read, and reports in order all the same.
type comparison struct {
	base, target io.ReaderAt
	free         chan *buffers
}

// step is a range that has changed, or is being read.
type step struct {
	from, to int64
	read     chan struct{} // nil: it has changed, without a look; closed when it has been read
	changed  uint64        // a bit for each of its blocks
	err      error
}

// run reports the changed blocks of a range. When it returns, nothing reads any more.
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
	// A client that does not read stops the rest.
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

// compare has the steps of a range read as soon as there are free buffers.
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
				s.err = c.look(b, s, before, after)
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

// look compares a step of both images. A hole is not read.
func (c *comparison) look(b *buffers, s *step, before, after content) error {
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

// eachBlock gives the blocks of a step; the first and the last may be a part of one.
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
