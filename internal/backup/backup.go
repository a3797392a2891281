package backup

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"

	"github.com/crust-proxy/crust-proxy/internal/backup/blocks"
)

// Backup is a backup to be made.
type Backup struct {
	// Snapshot is CSI's id. Base is nil for a full backup.
	Snapshot string
	Base     *Base
	// Blocks reads which blocks have data, or have changed since the base.
	Blocks *blocks.Reader
	// From is a device or image with the content of the snapshot.
	From string
	// File is the file to write. A part that an interrupted backup left is resumed.
	File string
}

// Result describes a backup that was made, or restored.
type Result struct {
	Header
	Data    int64  `json:"dataBytes"`    // of the volume, without zeros
	Resumed int64  `json:"resumedBytes"` // of the volume, that an interrupted backup or restore had already written
	Digest  string `json:"digest"`
}

// ReadBase reads what an increment needs to know of the backup before it.
func ReadBase(path string) (*Base, error) {
	var c chain
	defer func() { c.close() }()
	header, last, err := c.open(path)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return &Base{Snapshot: header.Snapshot, Digest: last.String(), size: header.Size}, nil
}

// Run makes the backup.
func (b *Backup) Run(ctx context.Context) (*Result, error) {
	from, err := os.Open(b.From)
	if err != nil {
		return nil, err
	}
	defer func() { _ = from.Close() }()
	has, err := from.Seek(0, io.SeekEnd)
	if err != nil {
		return nil, err
	}
	part, err := openPartial(b.File)
	if err != nil {
		return nil, err
	}
	defer func() { _ = part.file.Close() }() // complete has synced it
	w := &writer{file: part.file, Header: Header{Snapshot: b.Snapshot, Base: b.Base}}
	if err := w.resume(ctx, from); err != nil {
		return nil, fmt.Errorf("%s: %w", part.file.Name(), err)
	}
	resumed := w.next
	if !w.done {
		if err := (&copier{backup: b, from: from, has: has, to: w}).run(ctx); err != nil {
			return nil, err
		}
	}
	if err := part.complete(); err != nil {
		return nil, err
	}
	return &Result{Header: w.Header, Data: w.data, Resumed: resumed, Digest: w.sum.String()}, nil
}

type writer struct {
	Header
	progress

	file  *os.File
	out   func(written) error // writes at the file's end, in this order
	begun bool
	zeros frame // not written yet, as the next frame may continue it
}

// resume reads what an interrupted backup has written, and continues after it. The source must still have the same data:
// nothing else shows that it is the same source.
func (w *writer) resume(ctx context.Context, from *os.File) error {
	s, err := open(w.file)
	var torn *damage
	if errors.As(err, &torn) {
		return w.clear() // not even the header
	}
	if err != nil {
		return err
	}
	w.Size = s.header.Size
	if s.header.Base != nil && w.Base != nil {
		s.header.Base.size = w.Base.size
	}
	if !reflect.DeepEqual(w.Header, s.header) {
		return otherBackup(w.file.Name())
	}
	for has := make([]byte, mostData); err == nil && !s.done; {
		f, data, failed := s.frame()
		err = failed
		for at := f.offset; err == nil && !s.done && at < f.end(); at += mostData {
			if f.kind == kindZero {
				data = zeros[:min(f.end()-at, mostData)]
			}
			err = errors.Join(ctx.Err(), compare(from, at, data, has[:len(data)]))
		}
	}
	if err != nil && !errors.As(err, &torn) {
		return err
	}
	w.begun, w.progress = true, s.progress
	_, err = w.file.Seek(s.good, io.SeekStart)
	return errors.Join(err, w.file.Truncate(s.good))
}

// compare checks that a source has the same data, which is read into has.
func compare(from *os.File, at int64, data, has []byte) error {
	n, err := from.ReadAt(has, at)
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if !bytes.Equal(has[:n], data) {
		return otherSource(from.Name(), at)
	}
	return nil
}

// clear empties a file without a complete header, which a crash may have filled with zeros. It
// refuses a file that is not ours: images of disks begin with zeros too, but with fewer.
func (w *writer) clear() error {
	start := make([]byte, mostData)
	n, err := w.file.ReadAt(start, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if !bytes.HasPrefix([]byte(magic), start[:min(n, len(magic))]) && !bytes.Equal(start[:n], zeros[:n]) {
		return ErrExists
	}
	_, err = w.file.Seek(0, io.SeekStart)
	return errors.Join(err, w.file.Truncate(0))
}

func (w *writer) begin() error {
	text, err := json.Marshal(w.Header)
	if err != nil {
		return err
	}
	if len(text) > mostHeader {
		return errors.New("the id of the snapshot is too long")
	}
	head := binary.BigEndian.AppendUint32([]byte(magic), uint32(len(text))) //nolint:gosec // bounded
	w.begun = true
	return w.put(head, text)
}

// zero adds a range of zeros. Adjacent ranges are written as one frame.
func (w *writer) zero(at, size int64) error {
	if w.zeros.size > 0 && w.zeros.end() == at {
		w.zeros.size += size
		return nil
	}
	if err := w.flush(); err != nil {
		return err
	}
	w.zeros = frame{kindZero, at, size}
	return nil
}

func (w *writer) flush() error {
	if w.zeros.size == 0 {
		return nil
	}
	zeros := w.zeros
	w.zeros = frame{}
	return w.put(zeros.head())
}

func (w *writer) write(f frame, data []byte) error {
	w.data += int64(len(data))
	return w.put(f.head(), data)
}

func (w *writer) end() error {
	w.done = true
	return w.put(frame{kindDone, w.Size, w.data}.head())
}

// put writes after the zeros that are not written yet.
func (w *writer) put(parts ...[]byte) error {
	if err := w.flush(); err != nil {
		return err
	}
	w.sum = w.sum.after(parts...)
	return w.out(append(written(parts), bytes.Clone(w.sum[:])))
}
