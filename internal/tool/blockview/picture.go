package blockview

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/crust-proxy/crust-proxy/internal/backup/blocks"
	"github.com/crust-proxy/crust-proxy/internal/tool/printer"
	"github.com/crust-proxy/crust-proxy/internal/tool/show"
)

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
