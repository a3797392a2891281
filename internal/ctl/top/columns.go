package top

import (
	"fmt"
	"strings"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/ctl/show"
)

// The columns, in their order on the screen.
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

// column is how a column behaves.
type column struct {
	title string
	order Order // the order that it is the key of
	keyed bool
	// least is the width without which it is left out; most is that beyond which
	// it does not grow.
	least, most int
	right       bool
	text        func(*row) string // of a column that is as wide as its texts
}

var columns = [columnCount]column{
	colName:    {title: "VOLUME", order: ByName, keyed: true, least: 14, most: 48, text: func(r *row) string { return r.name }},
	colPod:     {title: "POD", least: 16, most: 48, text: func(r *row) string { return r.pod }},
	colState:   {title: "STATE", order: ByState, keyed: true, least: 5, most: 9, text: func(r *row) string { return r.state }},
	colUsage:   {title: "USAGE", order: ByUsage, keyed: true, least: 11, most: 26},
	colSize:    {title: "USED/SIZE", least: 9, most: 19, right: true, text: func(r *row) string { return r.size }},
	colInodes:  {title: "INODES", least: 6, most: 6, right: true},
	colStats:   {title: "STATS", order: ByLatency, keyed: true, least: 6, most: 6, right: true},
	colAge:     {title: "AGE", order: ByAge, keyed: true, least: 5, most: 6, right: true},
	colSandbox: {title: "SANDBOX", least: 8, most: shortID, text: func(r *row) string { return r.sandbox }},
	colHandler: {title: "HANDLER", least: 7, most: 16, text: func(r *row) string { return r.handler }},
	colDriver:  {title: "DRIVER", least: 8, most: 32, text: func(r *row) string { return r.driver }},
	colError:   {title: "ERROR", least: 24, most: 1 << 20, text: func(r *row) string { return r.err }},
}

// importance is the order in which columns get a place.
var importance = [...]int{colName, colState, colUsage, colPod, colStats, colSize, colInodes, colAge, colSandbox, colHandler, colDriver, colError}

const (
	gutter = 2 // of a row: the cursor and the mark of an error
	gap    = 2 // between columns
)

// naturalWidths are the widths of the columns' texts.
func (s *State) naturalWidths(rows []*row) (widths [columnCount]int) {
	for c, column := range columns {
		if column.text == nil {
			continue
		}
		for _, r := range rows {
			widths[c] = max(widths[c], cells(column.text(r)))
		}
	}
	return widths
}

// layout chooses the columns that fit and their widths; 0 is left out.
func (s *State) layout() (widths [columnCount]int) {
	room := s.width - gutter
	for _, c := range importance {
		least := s.least(c)
		if least == 0 {
			continue
		}
		if c == colName {
			least = min(least, max(1, room))
		}
		if c == colUsage && room < least {
			least = wordsOnly
		}
		if room < least {
			continue
		}
		widths[c] = least
		room -= least + gap
	}
	room += gap
	for _, c := range importance {
		if widths[c] == 0 {
			continue
		}
		more := min(max(0, s.wish(c)-widths[c]), max(0, room))
		widths[c] += more
		room -= more
	}
	return widths
}

// least is the width that a column needs; 0 where it has nothing to show.
func (s *State) least(c int) int {
	column := columns[c]
	if column.text == nil {
		return column.least
	}
	if s.list.natural[c] == 0 && c != colName && c != colState && c != colSize {
		return 0
	}
	switch c {
	case colState, colSize: // of no use when cut
		return max(column.least, s.wish(c))
	case colPod, colHandler, colDriver, colSandbox:
		return min(max(column.least, cells(column.title)), max(s.list.natural[c], cells(column.title)))
	}
	return column.least
}

// wish is the width that a column would like to have.
func (s *State) wish(c int) int {
	column := columns[c]
	if column.text == nil {
		return column.most
	}
	return min(column.most, max(s.list.natural[c], cells(column.title)+1))
}

// cell is what a column shows of a volume.
func (s *State) cell(c int, r *row, width int) []span {
	column := columns[c]
	one := func(code, text string) []span { return []span{{code, s.fit(text, width, column.right)}} }
	switch c {
	case colName:
		return one(bold, r.name)
	case colState:
		return one(show.StateColour(r.v.GetState()), r.state)
	case colUsage:
		return s.usageCell(r, width)
	case colInodes:
		return one(crowded(r.inodes), percent(r.inodes))
	case colStats:
		return one(latencyCode(r), s.latency(r))
	case colAge:
		return one(plain, s.age(r.created))
	case colError:
		return one(red, r.err)
	case colSandbox, colDriver, colHandler:
		return one(faint, column.text(r))
	}
	return one(plain, column.text(r))
}

// wordsOnly is the width of a usage without a bar.
const wordsOnly = 4

// usageCell is a bar and the part in words.
func (s *State) usageCell(r *row, width int) []span {
	if !r.bytes.known {
		return []span{{faint, s.fit("-", width, false)}}
	}
	words := span{plain, s.fit(percent(r.bytes), min(width, wordsOnly+1), true)}
	if width <= wordsOnly {
		words.code = fullness(r.bytes)
		return []span{words}
	}
	return append(s.bar(r.bytes, width-cells(words.text)), words)
}

func percent(m measure) string {
	if !m.known {
		return "-"
	}
	if text := show.Percent(m.used, m.total); text != "" {
		return text
	}
	return "-"
}

// crowded is the colour of inodes in words: none, unless they run short.
func crowded(m measure) string {
	if code := fullness(m); code != green {
		return code
	}
	return plain
}

// slow is from when on an answer is worth a colour.
const slow = time.Second

func latencyCode(r *row) string {
	switch {
	case r.asked && r.failed:
		return red
	case r.took >= slow:
		return yellow
	default:
		return plain
	}
}

// latency is how long the sandbox took, with a mark where it failed.
func (s *State) latency(r *row) string {
	if !r.asked {
		return "-"
	}
	if r.failed {
		return "!" + s.took(r.took)
	}
	return s.took(r.took)
}

// took shows a time in five cells at most.
func (s *State) took(d time.Duration) string {
	micro := "µs"
	if s.settings.ASCII {
		micro = "us"
	}
	switch {
	case d < time.Millisecond:
		return fmt.Sprintf("%d%s", d.Microseconds(), micro)
	case d < 10*time.Millisecond:
		return fmt.Sprintf("%.1fms", float64(d.Microseconds())/1e3)
	case d < time.Second:
		return fmt.Sprintf("%dms", d.Milliseconds())
	case d < 100*time.Second:
		return fmt.Sprintf("%.1fs", d.Seconds())
	}
	return show.Duration(d)
}

func (s *State) age(at time.Time) string {
	if at.IsZero() {
		return "-"
	}
	return show.Duration(s.now.Sub(at))
}

// heading names the columns and marks the one that the list is sorted by.
func (s *State) heading(widths [columnCount]int) string {
	var b strings.Builder
	b.WriteString(strings.Repeat(" ", gutter))
	first := true
	for c, width := range widths {
		if width == 0 {
			continue
		}
		if !first {
			b.WriteString(strings.Repeat(" ", gap))
		}
		first = false
		title := columns[c].title
		if columns[c].keyed && columns[c].order == s.order {
			title += s.arrow()
		}
		b.WriteString(s.fit(title, width, columns[c].right))
	}
	return s.paint(bold, strings.TrimRight(s.cut(b.String(), s.width), " "))
}

// arrow tells which way the list is sorted.
func (s *State) arrow() string {
	down, up := "▾", "▴"
	if s.settings.ASCII {
		down, up = "v", "^"
	}
	if s.up {
		return up
	}
	return down
}

// row draws one volume.
func (s *State) row(r *row, widths [columnCount]int, chosen bool) string {
	spans := []span{{cyan, " "}, {alarm, " "}}
	if chosen {
		spans[0].text = s.marker()
	}
	if r.err != "" {
		spans[1].text = "!"
	}
	first := true
	for c, width := range widths {
		if width == 0 {
			continue
		}
		if !first {
			spans = append(spans, span{plain, strings.Repeat(" ", gap)})
		}
		first = false
		spans = append(spans, s.cell(c, r, width)...)
	}
	var b strings.Builder
	if s.link.away {
		for i := range spans {
			spans[i].code = faint // it is old
		}
	}
	if !chosen {
		s.write(&b, spans, s.width)
		return strings.TrimRight(b.String(), " ")
	}
	for i := range spans {
		spans[i].code = plain
	}
	used := s.write(&b, spans, s.width)
	b.WriteString(strings.Repeat(" ", s.width-used))
	if s.settings.Plain {
		return strings.TrimRight(b.String(), " ")
	}
	return s.paint(reverse, b.String())
}

func (s *State) marker() string {
	if s.settings.ASCII {
		return ">"
	}
	return "▸"
}
