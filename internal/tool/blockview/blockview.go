// Package blockview prints the blocks of a snapshot: a picture for people, and three formats for programs.
package blockview

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"

	"github.com/crust-proxy/crust-proxy/internal/backup/blocks"
	"github.com/crust-proxy/crust-proxy/internal/tool/show"
)

// FormatPicture is for people.
const FormatPicture = "picture"

// Formats lists the formats.
func Formats() []string { return []string{FormatPicture, "json", "raw", "qemu-img-map"} }

// New returns what prints each message that Reader.Read reads in a format, and what prints the end. picture has the
// settings of FormatPicture.
func New(format string, out io.Writer, picture *Picture) (message func(blocks.Message) error, end func() error, err error) {
	noEnd := func() error { return nil }
	switch format {
	case FormatPicture:
		return picture.message, picture.end, nil
	case "json":
		return func(m blocks.Message) error { return writeJSON(out, m) }, noEnd, nil
	case "raw":
		return func(m blocks.Message) error { return writeRaw(out, m) }, noEnd, nil
	case "qemu-img-map":
		q := &qemuMap{out: bufio.NewWriter(out), changed: picture.Base != ""}
		return q.message, q.end, nil
	}
	return nil, nil, fmt.Errorf("--output %q is not picture, json, raw or qemu-img-map", format)
}

// messageObject has the keys of the sample client of KEP-3314's prototype, in its order.
type messageObject struct {
	Type     blocks.Type   `json:"block_metadata_type"`
	Capacity int64         `json:"volume_size_bytes"`
	Blocks   []rangeObject `json:"block_metadata"`
}

type rangeObject struct {
	Offset int64 `json:"byte_offset"`
	Size   int64 `json:"size_bytes"`
}

func writeJSON(out io.Writer, m blocks.Message) error {
	object := messageObject{Type: m.Type, Capacity: m.Capacity, Blocks: make([]rangeObject, 0, len(m.Ranges))}
	for _, r := range m.Ranges {
		object.Blocks = append(object.Blocks, rangeObject(r))
	}
	return json.NewEncoder(out).Encode(object)
}

// writeRaw writes a message at once: if an error follows, the last line is whole.
func writeRaw(out io.Writer, m blocks.Message) error {
	var lines []byte
	for _, r := range m.Ranges {
		lines = fmt.Appendf(lines, "%d %d\n", r.Offset, r.Size)
	}
	_, err := out.Write(lines)
	return err
}

// qemuMap prints the whole volume as `qemu-img map --output=json` does, adjacent ranges as one. Changed blocks are
// shown as those of an overlay, all others as those of its backing file. The writer keeps its first error.
type qemuMap struct {
	out      *bufio.Writer
	changed  bool
	last     blocks.Range // not printed yet, as the next may continue it
	capacity int64
	lines    int
}

func (q *qemuMap) message(m blocks.Message) error {
	q.capacity = m.Capacity
	for _, r := range m.Ranges {
		if q.last.Size > 0 && q.last.End() == r.Offset {
			q.last.Size += r.Size
			continue
		}
		q.printTo(r.Offset)
		q.last = r
	}
	_, err := q.out.Write(nil)
	return err
}

func (q *qemuMap) end() error {
	q.printTo(q.capacity)
	_, _ = q.out.WriteString(show.When(q.lines == 0, "[") + "]\n")
	return q.out.Flush()
}

// printTo prints the last range, and what lies between it and an offset.
func (q *qemuMap) printTo(to int64) {
	if q.last.Size > 0 {
		q.line(q.last, fmt.Sprintf(`"depth": 0, "present": true, "zero": false, "data": true, "compressed": false, "offset": %d`, q.last.Offset))
	}
	switch gap := (blocks.Range{Offset: q.last.End(), Size: to - q.last.End()}); {
	case gap.Size == 0:
	case q.changed:
		q.line(gap, `"depth": 1, "present": true, "zero": false, "data": true, "compressed": false`)
	default:
		q.line(gap, fmt.Sprintf(`"depth": 0, "present": true, "zero": true, "data": false, "compressed": false, "offset": %d`, gap.Offset))
	}
}

func (q *qemuMap) line(r blocks.Range, rest string) {
	before := show.Either(q.lines == 0, "[", ",\n")
	q.lines++
	_, _ = fmt.Fprintf(q.out, `%s{ "start": %d, "length": %d, %s}`, before, r.Offset, r.Size, rest)
}
