package ctl

import (
	"io"
	"os"
	"strings"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ctl/show"
)

// The colours that tables use.
const (
	plain  = show.Plain
	red    = show.Red
	green  = show.Green
	yellow = show.Yellow
	faint  = show.Faint
	bold   = show.Bold
	reset  = show.Reset
)

func isTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// colour paints text on terminals whose owner has not asked for none.
func (a *app) colour(code, text string) string {
	if code == plain || !a.world.Terminal || a.world.Getenv("NO_COLOR") != "" || a.world.Getenv("TERM") == "dumb" {
		return text
	}
	return code + text + reset
}

// cell is one field of a table: text that is escaped when it is made, so that
// no table can forget to.
type cell struct {
	text string
	code string
}

func text(s string) cell {
	if s == "" {
		s = nothing
	}
	return cell{text: escape(s)}
}

func painted(code, s string) cell {
	c := text(s)
	if s != "" {
		c.code = code
	}
	return c
}

// table is aligned columns under a heading.
type table struct {
	heading []string
	rows    [][]cell
	widths  []int
}

func (t *table) add(row ...cell) { t.rows = append(t.rows, row) }

// fit widens the columns to what is in them now.
func (t *table) fit() {
	if t.widths == nil {
		t.widths = make([]int, len(t.heading))
	}
	for i, h := range t.heading {
		t.widths[i] = max(t.widths[i], len(h))
	}
	for _, row := range t.rows {
		for i, c := range row {
			t.widths[i] = max(t.widths[i], utf8.RuneCountInString(c.text))
		}
	}
}

// print prints the table and forgets its rows, so that more can follow under
// the same heading.
func (a *app) print(t *table, withHeading bool) error {
	t.fit()
	var b strings.Builder
	if withHeading {
		heading := make([]cell, len(t.heading))
		for i, h := range t.heading {
			heading[i] = cell{text: h, code: bold}
		}
		a.row(&b, t.widths, heading)
	}
	for _, row := range t.rows {
		a.row(&b, t.widths, row)
	}
	t.rows = nil
	_, err := io.WriteString(a.world.Out, b.String())
	return err
}

func (a *app) row(b *strings.Builder, widths []int, row []cell) {
	for i, c := range row {
		b.WriteString(a.colour(c.code, c.text))
		if i < len(row)-1 {
			b.WriteString(strings.Repeat(" ", widths[i]-utf8.RuneCountInString(c.text)+3))
		}
	}
	b.WriteByte('\n')
}
