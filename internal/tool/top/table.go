package top

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/tool/show"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

const (
	colName = iota
	colPod
	colState
	colUsage
	colSize
	colInodes
	colStats
	colAge
	colSandbox
	colHandler
	colDriver
	colError
	columnCount
)

type column struct {
	title string
	// A column is left out where there is no room for its least width, and does not grow beyond most.
	least, most int
	sizing      sizing
	right       bool
	code        string
	colour      func(*row) string // instead of code, if it depends on the row
	text        func(*State, *row) string
}

// sizing says how the texts of a column change its width.
type sizing uint8

const (
	fixed    sizing = iota // not at all
	growing                // longer texts widen it
	whole                  // as growing, and never cut
	optional               // as growing, and left out when no row has a text
	snug                   // as optional, and narrower than its least width when all texts are
)

var columns = [columnCount]column{
	colName:    {title: "VOLUME", least: 14, most: 48, sizing: growing, code: show.Bold, text: func(_ *State, r *row) string { return r.name }},
	colPod:     {title: "POD", least: 16, most: 48, sizing: snug, text: func(_ *State, r *row) string { return r.pod }},
	colState:   {title: "STATE", least: 5, most: 9, sizing: whole, colour: stateColour, text: func(_ *State, r *row) string { return r.state }},
	colUsage:   {title: "USAGE", least: 11, most: 26}, // usageBar draws it
	colSize:    {title: "USED/SIZE", least: 9, most: 19, sizing: whole, right: true, text: func(_ *State, r *row) string { return r.size }},
	colInodes:  {title: "INODES", least: 6, most: 6, right: true, colour: func(r *row) string { return show.When(fullness(r.inodes) != show.Green, fullness(r.inodes)) }, text: func(_ *State, r *row) string { return percent(r.inodes) }},
	colStats:   {title: "STATS", least: 6, most: 6, right: true, colour: latencyColour, text: func(s *State, r *row) string { return s.canvas.latency(r) }},
	colAge:     {title: "AGE", least: 5, most: 6, right: true, text: func(s *State, r *row) string { return age(s.now, r.created) }},
	colSandbox: {title: "SANDBOX", least: 8, most: show.ShortIDLength, sizing: snug, code: show.Faint, text: func(_ *State, r *row) string { return r.sandbox }},
	colHandler: {title: "HANDLER", least: 7, most: 16, sizing: snug, code: show.Faint, text: func(_ *State, r *row) string { return r.handler }},
	colDriver:  {title: "DRIVER", least: 8, most: 32, sizing: snug, code: show.Faint, text: func(_ *State, r *row) string { return r.driver }},
	colError:   {title: "ERROR", least: 24, most: 1 << 20, sizing: optional, code: show.Red, text: func(_ *State, r *row) string { return r.err }},
}

var importance = [...]int{colName, colState, colUsage, colPod, colStats, colSize, colInodes, colAge, colSandbox, colHandler, colDriver, colError}

const (
	gutter = 2 // before a row: the cursor and the mark of an error
	gap    = 2 // between columns
	// percentWidth is the width of a usage without a bar.
	percentWidth = 4
)

type table struct {
	s       *State
	natural [columnCount]int // the widths of the longest texts
	widths  [columnCount]int // 0 is left out
}

func newTable(s *State) *table {
	t := &table{s: s}
	for c, column := range columns {
		for _, r := range s.list.rows {
			if column.sizing != fixed {
				t.natural[c] = max(t.natural[c], cells(column.text(s, r)))
			}
		}
	}
	return t
}

func (t *table) layout() {
	room := t.s.canvas.width - gutter
	for _, c := range importance {
		least := t.least(c)
		switch {
		case c == colName:
			least = min(least, max(1, room))
		case c == colUsage && room < least:
			least = percentWidth
		}
		if least == 0 || room < least {
			continue
		}
		t.widths[c] = least
		room -= least + gap
	}
	room += gap
	for _, c := range importance {
		if t.widths[c] > 0 {
			more := max(0, min(t.wish(c)-t.widths[c], room))
			t.widths[c] += more
			room -= more
		}
	}
}

func (t *table) unbounded() {
	for c, column := range columns {
		switch {
		case column.sizing == fixed:
			t.widths[c] = column.least
		case t.natural[c] > 0:
			t.widths[c] = max(t.natural[c], cells(column.title)+1)
		}
	}
	t.widths[colUsage] = 16
}

// least is the smallest useful width of a column; 0 when it has nothing to show.
func (t *table) least(c int) int {
	switch column := columns[c]; {
	case column.sizing == whole:
		return max(column.least, t.wish(c))
	case column.sizing >= optional && t.natural[c] == 0:
		return 0
	case column.sizing == snug:
		return max(cells(column.title), min(column.least, t.natural[c]))
	default:
		return column.least
	}
}

// wish is the width at which a column shows everything.
func (t *table) wish(c int) int {
	column := columns[c]
	if column.sizing == fixed {
		return column.most
	}
	return min(column.most, max(t.natural[c], cells(column.title)+1))
}

func (t *table) heading() string {
	var titles []string
	for c, width := range t.widths {
		if width == 0 {
			continue
		}
		title := columns[c].title
		if c == orders[t.s.list.order].column {
			title += show.Either(t.s.list.reversed, t.s.canvas.ascending, t.s.canvas.descending)
		}
		titles = append(titles, t.s.canvas.fit(title, width, columns[c].right))
	}
	text := strings.Repeat(" ", gutter) + strings.Join(titles, strings.Repeat(" ", gap))
	return t.s.canvas.paint(show.Bold, strings.TrimRight(t.s.canvas.cut(text, t.s.canvas.width), " "))
}

// row draws one volume. The chosen one is reversed and has no other colours.
func (t *table) row(r *row, chosen bool) string {
	canvas := t.s.canvas
	stale := t.s.old()
	canvas.plain = canvas.plain || chosen || stale
	parts := []string{show.Either(chosen, canvas.marker, " "), cmp.Or(canvas.paint(show.Alarm, show.When(r.err != "", "!")), " ")}
	for c, width := range t.widths {
		if width == 0 {
			continue
		}
		if len(parts) > gutter {
			parts = append(parts, strings.Repeat(" ", gap))
		}
		parts = append(parts, t.cell(canvas, c, r))
	}
	text := canvas.line("", parts...)
	switch {
	case chosen && !t.s.canvas.plain:
		return t.s.canvas.paint(show.Reverse, canvas.fit(text, canvas.width, false))
	case stale:
		return t.s.canvas.paint(show.Faint, text)
	}
	return text
}

func (t *table) cell(canvas canvas, c int, r *row) string {
	column, width := columns[c], t.widths[c]
	if c == colUsage {
		return usageBar(canvas, r.bytes, width)
	}
	if column.colour != nil {
		column.code = column.colour(r)
	}
	return canvas.paint(column.code, canvas.fit(column.text(t.s, r), width, column.right))
}

func stateColour(r *row) string { return show.StateColour(r.v.GetState()) }

func usageBar(canvas canvas, u *adminv1.VolumeUsage, width int) string {
	if u == nil {
		return canvas.paint(show.Faint, canvas.fit("-", width, false))
	}
	words := canvas.fit(percent(u), min(width, percentWidth+1), true)
	if width <= percentWidth {
		return canvas.paint(fullness(u), words)
	}
	return canvas.bar(u, width-cells(words)) + words
}

func percent(u *adminv1.VolumeUsage) string {
	return cmp.Or(show.Percent(u.GetUsed(), u.GetTotal()), "-")
}

// slow is the time from which an answer is highlighted.
const slow = time.Second

func latencyColour(r *row) string {
	return show.When(r.timed(), cmp.Or(show.When(r.failed, show.Red), show.When(r.took >= slow, show.Yellow)))
}

// latency is how long the sandbox took to answer, marked if the request failed. It takes at most six cells.
func (c canvas) latency(r *row) string {
	if !r.timed() {
		return "-"
	}
	mark := show.When(r.failed, "!")
	switch d := r.took; {
	case d < time.Millisecond:
		return fmt.Sprintf("%s%d%s", mark, d.Microseconds(), c.micro)
	case d < 10*time.Millisecond:
		return fmt.Sprintf("%s%.1fms", mark, float64(d.Microseconds())/1e3)
	case d < time.Second:
		return fmt.Sprintf("%s%dms", mark, d.Milliseconds())
	case d < 100*time.Second:
		return fmt.Sprintf("%s%.1fs", mark, d.Seconds())
	default:
		return mark + show.Duration(d)
	}
}

// age is how long ago something was; "-" for an unknown time.
func age(now, at time.Time) string {
	return show.Either(at.IsZero(), "-", show.Duration(now.Sub(at)))
}
