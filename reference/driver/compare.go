package driver

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/reference/fsops"
)

const (
	// compareStep is how much of each image is read at once: as many blocks as step.changed has bits.
	compareStep = 64 * sizeGrain
	// comparedAtOnce is how many steps all streams together read at the same time.
	comparedAtOnce = 4
	// knownAhead is how many steps of a stream may wait for earlier ones, or for the client.
	knownAhead = 64
)

type buffers struct{ was, is [compareStep]byte }

// newBuffers makes the buffers that all streams share. A step is read when one is free.
func newBuffers() chan *buffers {
	free := make(chan *buffers, comparedAtOnce)
	for range comparedAtOnce {
		free <- new(buffers)
	}
	return free
}

// comparison finds what has changed between two images. It reads several steps at the same time, but reports in order.
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
		return first.report(w)
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

func (s *step) report(w walk) (err error) {
	switch {
	case s.read == nil:
		return w.report(s.from, s.to)
	case s.err != nil:
		return s.err
	case s.changed == 0:
		return w.unchanged(s.from, s.to)
	}
	s.eachBlock(func(from, to int64, bit uint64) {
		if err == nil && s.changed&bit != 0 {
			err = w.report(from, to)
		}
	})
	return err
}

// content is what is known of a piece of an image without reading it.
type content int

const (
	// unknown content has to be read.
	unknown content = iota
	// zeros is a hole, or blocks that were never written.
	zeros
	// shared content is the same in all images that have it at the same place of the disk.
	shared
	// private content is in no other image.
	private
)

// piece is a part of an image, up to the offset end, in which the kind of content is the same.
type piece struct {
	content content
	place   uint64 // where shared content is on the disk
	end     int64
}

// layout describes where an image has data.
type layout interface {
	// piece returns the piece that begins at an offset. Offsets ascend from call to call.
	piece(at int64) (piece, error)
}

// regions is the layout of a file by its holes, which every filesystem reports.
type regions struct {
	file       *os.File
	size       int64
	data, hole int64 // where the data that was found last begins and ends
}

func (r *regions) piece(at int64) (piece, error) {
	if at >= r.hole {
		if err := r.find(at); err != nil {
			return piece{}, fmt.Errorf("find the data of %s from byte %d on: %w", r.file.Name(), at, err)
		}
	}
	if at < r.data {
		return piece{content: zeros, end: r.data}, nil
	}
	return piece{content: unknown, end: r.hole}, nil
}

func (r *regions) find(at int64) (err error) {
	r.data, err = unix.Seek(int(r.file.Fd()), at, unix.SEEK_DATA)
	if errors.Is(err, unix.ENXIO) { // only a hole is left
		r.data, r.hole = r.size, r.size
		return nil
	}
	if err == nil {
		r.hole, err = unix.Seek(int(r.file.Fd()), r.data, unix.SEEK_HOLE)
	}
	return err
}

// extents is the layout of a file by the places of its data on the disk, which files that share data have in common.
type extents struct {
	size  int64
	fetch func(from, to int64) (found []extent, all bool, err error)
	found []extent
	all   bool // no others follow
}

// layoutOf returns the extents of a file, unless nothing can be shared or the filesystem does not list them.
func layoutOf(file *os.File, size int64, reflinks bool) layout {
	if reflinks {
		if _, _, err := fiemap(file, 0, sizeGrain); err == nil {
			return &extents{size: size, fetch: func(from, to int64) ([]extent, bool, error) { return fiemap(file, from, to) }}
		}
	}
	return &regions{file: file, size: size}
}

func (e *extents) piece(at int64) (piece, error) {
	for e.skip(at); len(e.found) == 0 && !e.all; e.skip(at) {
		var err error
		if e.found, e.all, err = e.fetch(at, e.size); err != nil {
			return piece{}, err
		}
		if n := len(e.found); !e.all && (n == 0 || e.found[n-1].end() <= at) {
			return piece{}, fmt.Errorf("the kernel lists no extents beyond byte %d, and says that there are some", at)
		}
	}
	if len(e.found) == 0 {
		return piece{content: zeros, end: e.size}, nil
	}
	first := e.found[0]
	if begin := int64(first.Logical); begin > at { //nolint:gosec // no file has 2^63 bytes
		return piece{content: zeros, end: min(begin, e.size)}, nil
	}
	return piece{content: first.content(), place: first.Physical + uint64(at) - first.Logical, end: first.end()}, nil //nolint:gosec // at is in the extent
}

func (e *extents) skip(at int64) {
	for len(e.found) > 0 && e.found[0].end() <= at {
		e.found = e.found[1:]
	}
}

// extent is the kernel's struct fiemap_extent.
type extent struct {
	Logical, Physical, Length uint64
	_                         [2]uint64
	Flags                     uint32
	_                         [3]uint32
}

// These are of the kernel's linux/fiemap.h.
const (
	fsIocFiemap         = 0xC020660B
	fiemapSync          = 0x1
	extentLast          = 0x1
	extentNotKnown      = 0x2
	extentDelayed       = 0x4
	extentEncoded       = 0x8
	extentEncrypted     = 0x80
	extentNotAligned    = 0x100
	extentInline        = 0x200
	extentTail          = 0x400
	extentUnwritten     = 0x800
	extentShared        = 0x2000
	extentProvesNothing = extentNotKnown | extentDelayed | extentEncoded | extentEncrypted | extentNotAligned | extentInline | extentTail
)

func (e extent) end() int64 { return int64(e.Logical + e.Length) } //nolint:gosec // no file has 2^63 bytes

// content is unknown if the place of an extent says nothing about its data: the extent has no
// place yet, or shares it with other extents of the same file, as compressed ones do.
func (e extent) content() content {
	switch {
	case e.Flags&extentProvesNothing != 0:
		return unknown
	case e.Flags&extentUnwritten != 0:
		return zeros
	case e.Flags&extentShared != 0:
		return shared
	}
	return private
}

// extentsAtOnce bounds the memory, whatever the size of an image.
const extentsAtOnce = 256

// fiemap lists the first extents of a range and whether these are all. It writes dirty data first: that has no place.
func fiemap(file *os.File, from, to int64) (found []extent, all bool, err error) {
	request := struct { // the kernel's struct fiemap
		start, length                  uint64
		flags, mapped, count, reserved uint32
		extents                        [extentsAtOnce]extent
	}{start: uint64(from), length: uint64(to - from), flags: fiemapSync, count: extentsAtOnce} //nolint:gosec // from is in the file
	if _, err := fsops.Ioctl(int(file.Fd()), fsIocFiemap, &request); err != nil {
		return nil, false, fmt.Errorf("list the extents of %s from byte %d on: %w", file.Name(), from, err)
	}
	found = request.extents[:min(request.mapped, extentsAtOnce)]
	all = len(found) < extentsAtOnce || found[len(found)-1].Flags&extentLast != 0
	return found, all, nil
}
