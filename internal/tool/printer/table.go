package printer

import (
	"unicode/utf8"

	"github.com/crust-proxy/crust-proxy/internal/tool/show"
)

// Nothing is the text of an empty cell.
const Nothing = "-"

// Cell is one field of a table. Its text is escaped when the cell is made, so that no table
// can fail to do it.
type Cell struct{ text, code string }

// Text is a cell without a colour.
func Text(s string) Cell {
	if s == "" {
		s = Nothing
	}
	return Cell{text: show.Escape(s)}
}

// Painted is a cell with a colour, unless it is empty.
func Painted(code, s string) Cell {
	c := Text(s)
	if s != "" {
		c.code = code
	}
	return c
}

// YesNo is a green yes or a red no.
func YesNo(yes bool) Cell {
	if yes {
		return Painted(show.Green, "yes")
	}
	return Painted(show.Red, "no")
}

func (c Cell) width() int { return utf8.RuneCountInString(c.text) }

// Table is aligned columns.
type Table struct {
	// Widths are the columns' least widths; they grow with what is printed.
	Widths []int
	rows   [][]Cell
}

// NewTable makes a table with a heading. One without a heading is a &Table{}.
func NewTable(heading ...string) *Table {
	row := make([]Cell, len(heading))
	for i, h := range heading {
		row[i] = Painted(show.Bold, h)
	}
	return &Table{rows: [][]Cell{row}}
}

// Add appends a row.
func (t *Table) Add(row ...Cell) { t.rows = append(t.rows, row) }

// Pair appends a label and its value.
func (t *Table) Pair(label, value string) { t.Add(Text(label), Text(value)) }

func (t *Table) fit() {
	for _, row := range t.rows {
		t.Widths = append(t.Widths, make([]int, max(0, len(row)-len(t.Widths)))...)
		for i, c := range row {
			t.Widths[i] = max(t.Widths[i], c.width())
		}
	}
}
