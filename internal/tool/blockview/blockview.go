// Package blockview prints the blocks of a snapshot: a picture for people, and three formats for programs.
package blockview

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"github.com/crust-proxy/crust-proxy/internal/backup/blocks"
	"github.com/crust-proxy/crust-proxy/internal/tool/printer"
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

const (
	mostRows = 8
	// labelWidth is the width of the offset before a row, with two spaces.
	labelWidth = 10
	// columnGrain makes the sizes of rows round.
	columnGrain = 16
	smallest    = 4096 // bytes of a character at least
)

// Picture shows a volume as rows of characters, each of which is an equal share of it.
type Picture struct {
	Out   *printer.Printer
	Width int
	ASCII bool
	// Snapshot is the one that is shown; Base is empty unless its changes are.
	Snapshot, Base string

	capacity, cell int64 // bytes
	columns        int
	filled         []int64 // the bytes in each cell
	ranges, bytes  int64
}

func (p *Picture) message(m blocks.Message) error {
	if p.filled == nil {
		p.layOut(m.Capacity)
	}
	for _, r := range m.Ranges {
		p.ranges++
		p.bytes += r.Size
		for at := r.Offset; at < r.End(); {
			n := min(p.cell-at%p.cell, r.End()-at)
			p.filled[at/p.cell] += n
			at += n
		}
	}
	return nil
}

// layOut chooses the size of a cell: a power of two with which there are few rows.
func (p *Picture) layOut(capacity int64) {
	p.columns = max((p.Width-labelWidth)/columnGrain, 1) * columnGrain
	p.capacity, p.cell = capacity, smallest
	for (capacity-1)/p.cell >= int64(mostRows*p.columns) {
		p.cell *= 2
	}
	p.filled = make([]int64, (capacity-1)/p.cell+1)
}

func (p *Picture) end() error {
	what := show.Either(p.Base != "", "have changed since "+p.Base, "have data")
	title := fmt.Sprintf("%s: %s of %s (%s) %s, in %d ranges.", p.Snapshot, show.Size(p.bytes), show.Size(p.capacity),
		show.Percent(p.bytes, p.capacity), what, p.ranges)
	if p.filled == nil {
		return p.Out.Line(p.Snapshot + ": no blocks " + what + ".")
	}
	err := p.Out.Line(title)
	for row := 0; row < len(p.filled); row += p.columns {
		err = cmp.Or(err, p.row(row, p.filled[row:min(row+p.columns, len(p.filled))]))
	}
	g := p.glyphs()
	return cmp.Or(err, p.Out.Line(fmt.Sprintf("A character is %s: %c nothing, %c %c %c some, %c all of it.", show.Size(p.cell), g[0], g[1], g[2], g[3], g[4])))
}

func (p *Picture) row(first int, cells []int64) error {
	var text strings.Builder
	for at, bytes := range cells {
		size := min(p.cell, p.capacity-int64(first+at)*p.cell)
		text.WriteRune(p.glyphs()[level(bytes, size)])
	}
	colour := show.Either(p.Base != "", show.Yellow, show.Green)
	_, err := fmt.Fprintf(p.Out.Out, "%*s  %s\n", labelWidth-2, show.Size(int64(first)*p.cell), p.Out.Paint(colour, text.String()))
	return err
}

func (p *Picture) glyphs() []rune {
	return []rune(show.Either(p.ASCII, ".:+*#", "·░▒▓█"))
}

// level is how full a cell is: 0 only if it is empty, and 4 only if it is full.
func level(bytes, size int64) int {
	switch {
	case bytes == 0:
		return 0
	case bytes >= size:
		return 4
	}
	return 1 + int(3*float64(bytes)/float64(size))
}
