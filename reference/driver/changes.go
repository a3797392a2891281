package driver

import (
	"github.com/container-storage-interface/spec/lib/go/csi"
)

// walk goes once through a range of an image.
type walk struct {
	from, to int64
	// alive gives the reason to end before the end.
	alive func() error
	// report is called with ranges that ascend; the next may begin where the last ended.
	report func(from, to int64) error
}

// allocated reports where an image has data.
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

// changed reports where an image is another one than its base. Where the layouts do not
// know, it has the data compared.
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

// blocksAtOnce is how many ranges one message has at most: it bounds memory, and a client
// that begins again has lost little.
const blocksAtOnce = 1024

// reporter merges ranges and sends them in messages.
type reporter struct {
	most  int // in a message
	send  func([]*csi.BlockMetadata) error
	batch []*csi.BlockMetadata
	// What was reported: for the log.
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
		// The last one of a full message may still grow until now.
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

// end sends what is left; also where there is nothing, as each message has the capacity.
func (r *reporter) end() error {
	if r.sent && len(r.batch) == 0 {
		return nil
	}
	return r.flush()
}
