package backup

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"os"
)

const (
	magic      = "CRUSTBK1"
	mostHeader = 64 << 10
	// mostData is how much is read, checked and written at once.
	mostData = 1 << 20
	// headSize is the size of a frame before its data.
	headSize = 4 + 8 + 8
)

type kind string

const (
	kindData kind = "DATA"
	kindZero kind = "ZERO"
	kindDone kind = "DONE"
)

// Header describes the content of a file.
type Header struct {
	// Size is the size of the volume in bytes.
	Size int64 `json:"size"`
	// Snapshot is CSI's id of the snapshot.
	Snapshot string `json:"snapshot"`
	// Base is nil in a full backup.
	Base *Base `json:"base,omitempty"`
}

// Base is the backup that an increment is based on.
type Base struct {
	Snapshot string `json:"snapshot"`
	// Digest is the last digest of its file, in hexadecimal digits.
	Digest string `json:"digest"`

	size int64 // of its volume; only ReadBase sets it
}

type digest [sha256.Size]byte

func (d digest) String() string { return hex.EncodeToString(d[:]) }

// after returns the digest of parts that follow a digest.
func (d digest) after(parts ...[]byte) digest {
	h := sha256.New()
	_, _ = h.Write(d[:]) // a hash does not fail
	for _, part := range parts {
		_, _ = h.Write(part)
	}
	return digest(h.Sum(nil))
}

type frame struct {
	kind         kind
	offset, size int64
}

func (f frame) end() int64 { return f.offset + f.size }

func (f frame) head() []byte {
	head := append(make([]byte, 0, headSize), f.kind...)
	head = binary.BigEndian.AppendUint64(head, uint64(f.offset)) //nolint:gosec // never negative
	return binary.BigEndian.AppendUint64(head, uint64(f.size))   //nolint:gosec // the same
}

// progress is how far a file has been read or written.
type progress struct {
	sum  digest
	next int64 // the offset in the volume that was reached
	data int64 // bytes in DATA
	done bool
}

// stream reads the frames of a file from its beginning.
type stream struct {
	progress

	in     *bufio.Reader
	header Header
	good   int64 // the bytes of the file that were checked
	buf    []byte
}

func open(in io.Reader) (*stream, error) {
	s := &stream{in: bufio.NewReaderSize(in, 128<<10), buf: make([]byte, mostData)}
	head := make([]byte, len(magic)+4)
	if err := s.read(head); err != nil {
		return nil, err
	}
	length := int(binary.BigEndian.Uint32(head[len(magic):]))
	if string(head[:len(magic)]) != magic || length > mostHeader {
		return nil, s.damage("this is not a backup of crust-backup")
	}
	text := make([]byte, length)
	if err := s.readSummed(head, text); err != nil {
		return nil, err
	}
	if err := json.Unmarshal(text, &s.header); err != nil || s.header.Size < 0 {
		return nil, s.damage("the header cannot be read")
	}
	s.good = int64(len(head) + length + len(s.sum))
	return s, nil
}

// frame reads the next frame. Its data is valid until the next call. DONE is the last frame.
func (s *stream) frame() (f frame, data []byte, err error) {
	head := make([]byte, headSize)
	if err := s.read(head); err != nil {
		return f, nil, err
	}
	f = frame{kind(head[:4]), int64(binary.BigEndian.Uint64(head[4:])), int64(binary.BigEndian.Uint64(head[12:]))} //nolint:gosec // checked below
	if !s.allows(f) {
		return f, nil, s.damage("there is no frame here")
	}
	if f.kind == kindData {
		data = s.buf[:f.size]
	}
	if err := s.readSummed(head, data); err != nil {
		return f, nil, err
	}
	s.good += int64(headSize + len(data) + len(s.sum))
	s.data += int64(len(data))
	if s.done = f.kind == kindDone; s.done {
		if _, err := s.in.ReadByte(); !errors.Is(err, io.EOF) {
			return f, nil, s.damage("something follows the end")
		}
		return f, nil, nil
	}
	s.next = f.end()
	return f, data, nil
}

func (s *stream) allows(f frame) bool {
	switch f.kind {
	case kindDone:
		return f.offset == s.header.Size && f.size == s.data
	case kindData, kindZero:
		inside := f.size > 0 && f.offset >= s.next && f.size <= s.header.Size && f.offset <= s.header.Size-f.size
		return inside && (f.kind == kindZero || f.size <= mostData)
	}
	return false
}

// readSummed reads what follows a head, and its digest.
func (s *stream) readSummed(head, data []byte) error {
	var stored digest
	for _, into := range [][]byte{data, stored[:]} {
		if err := s.read(into); err != nil {
			return err
		}
	}
	want := s.sum.after(head, data)
	if !bytes.Equal(stored[:], want[:]) {
		return s.damage("the checksum is wrong")
	}
	s.sum = want
	return nil
}

func (s *stream) read(into []byte) error {
	_, err := io.ReadFull(s.in, into)
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return s.damage("it ends too early: the backup was not completed")
	}
	return err
}

// tail reads only the header and the last digest of a complete file.
func tail(file *os.File) (*Header, digest, error) {
	var last digest
	s, err := open(file)
	if err != nil {
		return nil, last, err
	}
	end, err := file.Seek(-headSize-int64(len(last)), io.SeekEnd)
	if err != nil {
		return nil, last, err
	}
	text := make([]byte, headSize+len(last))
	if _, err := io.ReadFull(file, text); err != nil {
		return nil, last, err
	}
	if end < s.good || kind(text[:4]) != kindDone || int64(binary.BigEndian.Uint64(text[4:])) != s.header.Size { //nolint:gosec // compared only
		return nil, last, &damage{at: end, text: "it has no end: the backup was not completed"}
	}
	copy(last[:], text[headSize:])
	return &s.header, last, nil
}
