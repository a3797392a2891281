package backup

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
)

// chain is a full backup and its increments, in their order.
type chain []*os.File

// Check reads all of a full backup and its increments, and returns what they restore.
func Check(ctx context.Context, paths []string) (*Result, error) {
	c, err := openChain(paths)
	if err != nil {
		return nil, err
	}
	defer c.close()
	return c.check(ctx)
}

// Restore writes the content of the last one of the files to target, a block device that is
// not in use, or a new file. Nothing is written before all files have been checked. What an
// interrupted restore has written already is not written again.
func Restore(ctx context.Context, paths []string, target string) (*Result, error) {
	c, err := openChain(paths)
	if err != nil {
		return nil, err
	}
	defer c.close()
	result, err := c.check(ctx)
	if err != nil {
		return nil, err
	}
	t, err := openTarget(target, result.Size)
	if err != nil {
		return nil, err
	}
	err = c.apply(ctx, t)
	if err == nil {
		err = t.complete()
	}
	if err = errors.Join(err, t.file.Close()); err != nil {
		return nil, incomplete(target, err)
	}
	result.Resumed = t.right
	return result, nil
}

func openChain(paths []string) (chain, error) {
	var c chain
	var before string
	var size int64
	for i, path := range paths {
		header, last, err := c.open(path)
		switch {
		case err != nil:
			err = fmt.Errorf("%s: %w", path, err)
		case i == 0 && header.Base != nil:
			err = notFull(path, header)
		case i > 0 && (header.Base == nil || header.Base.Digest != before):
			err = notNext(path, paths[i-1], header)
		case header.Size < size:
			err = shrunk(path, size, header.Size)
		}
		if err != nil {
			c.close()
			return nil, err
		}
		before, size = last.String(), header.Size
	}
	return c, nil
}

func (c *chain) open(path string) (*Header, digest, error) {
	file, err := os.Open(path) //nolint:gosec // the caller names it
	if err != nil {
		return nil, digest{}, err
	}
	*c = append(*c, file)
	if err := uncache(file); err != nil {
		return nil, digest{}, err
	}
	return tail(file)
}

func (c chain) close() {
	for _, file := range c {
		_ = file.Close() // only read
	}
}

// check reads all files to their ends.
func (c chain) check(ctx context.Context) (*Result, error) {
	result := &Result{}
	for _, file := range c {
		s, err := each(ctx, file, func(frame, []byte) error { return nil })
		if err != nil {
			return nil, err
		}
		result.Header, result.Digest = s.header, s.sum.String()
		result.Data += s.data
	}
	return result, nil
}

// each calls do with every frame of a file but the last.
func each(ctx context.Context, file *os.File, do func(frame, []byte) error) (*stream, error) {
	if _, err := file.Seek(0, 0); err != nil {
		return nil, err
	}
	s, err := open(file)
	for err == nil && !s.done {
		f, data, failed := s.frame()
		if err = failed; err == nil && !s.done {
			err = cmp.Or(do(f, data), ctx.Err())
		}
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file.Name(), err)
	}
	return s, nil
}

func (c chain) apply(ctx context.Context, t *target) error {
	for i, file := range c {
		var next int64
		_, err := each(ctx, file, func(f frame, data []byte) error {
			defer failpoint.Hit("restore-frame")
			if i == 0 {
				// In a full backup, bytes in no frame are zero. So is the rest of a larger device: at its end may be
				// the copy of a partition table, or the superblock of a RAID.
				if err := t.zero(ctx, next, f.offset); err != nil {
					return err
				}
				next = f.end()
			}
			if f.kind == kindZero {
				return t.zero(ctx, f.offset, f.end())
			}
			return t.write(data, f.offset)
		})
		if err == nil && i == 0 {
			err = t.zero(ctx, next, t.size)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
