package driver

import (
	"github.com/container-storage-interface/spec/lib/go/csi"
)

// walk iterates once over a range of an image.
type walk struct {
	from, to int64
	// alive returns an error if the walk is to stop early.
	alive func() error
	// report is called with ranges that ascend; the next may begin where the last ended.
	report func(from, to int64) error
}

// allocated reports the ranges in which an image has data.
func (w walk) allocated(image layout) error {
	for at := w.from; at < w.to; {
		if err := w.alive(); err != nil {
			return err
		}
		p, err := image.piece(at)
		if err != nil {
			return err
		}
		end := min(p.end, w.to)
		if p.content != zeros {
			if err := w.report(at, end); err != nil {
				return err
			}
		}
		at = end
	}
	return nil
}

// changed reports the ranges in which an image differs from its base. It calls compare for
// those of which the layouts do not say it.
func (w walk) changed(base, target layout, compare func(part walk, before, after piece) error) error {
	for at := w.from; at < w.to; {
		if err := w.alive(); err != nil {
			return err
		}
		before, err := base.piece(at)
		if err != nil {
			return err
		}
		after, err := target.piece(at)
		if err != nil {
			return err
		}
		part := w
		part.from, part.to = at, min(before.end, after.end, w.to)
		switch {
		case before.same(after):
		case before.content == unknown || after.content == unknown:
			err = compare(part, before, after)
		default:
			err = w.report(part.from, part.to)
		}
		if err != nil {
			return err
		}
		at = part.to
	}
	return nil
}

// blocksAtOnce is how many ranges a message has at most. It bounds the memory, and a client
// that has to resume has lost little.
const blocksAtOnce = 1024

// reporter merges ranges and sends them in messages.
type reporter struct {
	most  int // in a message
	send  func([]*csi.BlockMetadata) error
	batch []*csi.BlockMetadata
	// What was reported, for the log and the metrics.
	sent          bool
	ranges, bytes int64
}

// report adds a range, which begins where the last one ended or later.
func (r *reporter) report(from, to int64) error {
	r.bytes += to - from
	if n := len(r.batch); n > 0 {
		if last := r.batch[n-1]; last.ByteOffset+last.SizeBytes == from {
			last.SizeBytes += to - from
			return nil
		}
		// A full message is sent only now: until here its last range could still grow.
		if n == r.most {
			if err := r.flush(); err != nil {
				return err
			}
		}
	}
	r.ranges++
	r.batch = append(r.batch, &csi.BlockMetadata{ByteOffset: from, SizeBytes: to - from})
	return nil
}

func (r *reporter) flush() error {
	batch := r.batch
	r.batch, r.sent = nil, true
	return r.send(batch)
}

// end sends what is left. If nothing was sent, it sends an empty message, which has the
// capacity.
func (r *reporter) end() error {
	if r.sent && len(r.batch) == 0 {
		return nil
	}
	return r.flush()
}
