package backup

import (
	"bytes"
	"context"
	"fmt"
	"io"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/backup/blocks"
	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
)

// copier copies the blocks of a volume into the file of a backup. Reading, hashing and writing
// are a goroutine each, because one alone waits for the disks or for a processor most of the time.
type copier struct {
	backup *Backup
	from   io.ReaderAt
	has    int64 // the size of from
	to     *writer

	begun bool              // the header is written, or on its way
	heard bool              // the server has sent a message
	size  int64             // of the volume, once begun
	steps chan func() error // of the writer
	free  chan []byte       // buffers for data
}

// written is a frame with its digest: what is written at once.
type written [][]byte

// buffers bounds what was read and is not written yet. mostCached is about how much of the file the
// kernel keeps in its cache, if the disk can follow.
const buffers, mostCached = 8, 32 << 20

func (c *copier) run(ctx context.Context) error {
	c.begun, c.size = c.to.begun, c.to.Size
	c.steps, c.free = make(chan func() error), make(chan []byte, buffers)
	for range buffers {
		c.free <- make([]byte, mostData)
	}
	frames := make(chan written, buffers)
	group, ctx := errgroup.WithContext(ctx)
	c.to.out = func(frame written) error { return send(ctx, frames, frame) }
	from := c.to.next
	group.Go(func() error {
		defer close(c.steps)
		return c.read(ctx, from)
	})
	group.Go(func() error {
		defer close(frames)
		for step := range c.steps {
			if err := step(); err != nil {
				return err
			}
		}
		return nil
	})
	group.Go(func() error { return c.write(frames) })
	return group.Wait()
}

func send[V any](ctx context.Context, to chan<- V, v V) error {
	select {
	case to <- v:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (c *copier) read(ctx context.Context, from int64) (err error) {
	if !c.begun || from < c.size { // a server may refuse to start at the volume's end
		err = c.backup.Blocks.Read(ctx, from, func(m blocks.Message) error { return c.message(ctx, m) })
	}
	if err == nil && !c.heard {
		err = c.unnamed(ctx, from)
	}
	if err != nil {
		return err
	}
	return send(ctx, c.steps, c.to.end)
}

// unnamed copies what a server has not named that sent no message, which proves nothing: all without a base, else
// what is beyond the base.
func (c *copier) unnamed(ctx context.Context, from int64) (err error) {
	size := c.size
	if !c.begun {
		size, err = c.unnamedSize(ctx)
	}
	if base := c.backup.Base; base != nil {
		from = max(from, base.size)
	}
	if err != nil {
		return err
	}
	return c.message(ctx, blocks.Message{Capacity: size, Ranges: []blocks.Range{{Offset: from, Size: size - from}}})
}

// unnamedSize takes zeros beyond the base for no growth of the volume: From may be larger.
func (c *copier) unnamedSize(ctx context.Context) (int64, error) {
	base, buf := c.backup.Base, make([]byte, mostData)
	if base == nil {
		return c.has, nil
	}
	for at := base.size; at < c.has && ctx.Err() == nil; at += int64(len(buf)) {
		buf = buf[:min(mostData, c.has-at)]
		if n, err := c.from.ReadAt(buf, at); n < len(buf) {
			return 0, fmt.Errorf("read %s at byte %d: %w", c.backup.From, at+int64(n), err)
		}
		if !bytes.Equal(buf, zeros[:len(buf)]) {
			return c.has, nil
		}
	}
	return base.size, ctx.Err()
}

func (c *copier) message(ctx context.Context, m blocks.Message) error {
	c.heard = true
	if err := c.begin(ctx, m.Capacity); err != nil {
		return err
	}
	for _, r := range m.Ranges {
		for at := r.Offset; at < r.End(); {
			// Steps are aligned, because devices read aligned blocks faster.
			end := min((at/mostData+1)*mostData, r.End())
			if err := c.copy(ctx, at, end-at); err != nil {
				return err
			}
			at = end
		}
	}
	return nil
}

// begin checks the volume's size, and writes the header if that was not done yet.
func (c *copier) begin(ctx context.Context, size int64) error {
	switch base := c.backup.Base; {
	case size == 0:
		return fmt.Errorf("%s is empty: is it the right one?", c.backup.From)
	case size > c.has:
		return tooSmall(c.backup.From, c.has, size)
	case base != nil && size < base.size:
		return shrunk(c.backup.File, base.size, size) // restore would refuse it
	case c.begun && c.size != size:
		return otherBackup(c.backup.File + ".part")
	case c.begun:
		return nil
	}
	c.begun, c.size = true, size
	return send(ctx, c.steps, func() error { c.to.Size = size; return c.to.begin() })
}

func (c *copier) copy(ctx context.Context, at, size int64) error {
	var whole []byte
	select {
	case whole = <-c.free:
	case <-ctx.Done():
		return ctx.Err()
	}
	buf := whole[:size]
	if n, err := c.from.ReadAt(buf, at); n < len(buf) {
		return fmt.Errorf("read %s at byte %d: %w", c.backup.From, at+int64(n), err)
	}
	if bytes.Equal(buf, zeros[:size]) {
		c.free <- whole
		return send(ctx, c.steps, func() error { return c.to.zero(at, size) })
	}
	return send(ctx, c.steps, func() error { return c.to.write(frame{kindData, at, size}, buf) })
}

// write writes frames, and frees the buffers of their data.
func (c *copier) write(frames <-chan written) error {
	cached := 0
	for frame := range frames {
		for _, part := range frame {
			if _, err := c.to.file.Write(part); err != nil {
				return err
			}
			if cap(part) == mostData {
				cached += len(part)
				c.free <- part[:mostData]
			}
		}
		if cached >= mostCached {
			// The kernel starts to write to the disk, and drops what is there already, so that the last sync is
			// short and the node's cache is not filled. No error is lost: that sync reports what the disk refused.
			_ = unix.Fadvise(int(c.to.file.Fd()), 0, 0, unix.FADV_DONTNEED)
			cached = 0
		}
		failpoint.Hit("backup-frame")
	}
	return nil
}
