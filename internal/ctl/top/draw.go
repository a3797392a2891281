package top

import (
	"strings"

	"github.com/charmbracelet/x/ansi"

	"github.com/crust-proxy/crust-proxy/internal/ctl/show"
)

// The colours and attributes of a picture.
const (
	plain   = show.Plain
	red     = show.Red
	green   = show.Green
	yellow  = show.Yellow
	cyan    = "\x1b[36m"
	faint   = show.Faint
	bold    = show.Bold
	reverse = "\x1b[7m"
	alarm   = "\x1b[1;31m"
	reset   = show.Reset
)

// span is a piece of a line.
type span struct {
	code, text string
}

func (s *State) paint(code, text string) string {
	if code == plain || text == "" || s.settings.Plain {
		return text
	}
	return code + text + reset
}

// cells is how many cells of the terminal a text takes.
func cells(text string) int {
	for i := range len(text) {
		if text[i] >= 0x80 {
			return ansi.StringWidth(text)
		}
	}
	return len(text)
}

// cut shortens a text to a width, and says so by its end.
func (s *State) cut(text string, width int) string {
	if cells(text) <= width {
		return text
	}
	end := "…"
	if s.settings.ASCII {
		end = "~"
	}
	return ansi.Truncate(text, max(0, width), end)
}

// fit makes a text exactly as wide as its column.
func (s *State) fit(text string, width int, right bool) string {
	text = s.cut(text, width)
	space := strings.Repeat(" ", max(0, width-cells(text)))
	if right {
		return space + text
	}
	return text + space
}

// line puts pieces side by side, some of them to the right edge, and cuts what
// does not fit: the right ones stay.
func (s *State) line(left, right []span) string {
	var b strings.Builder
	end := min(s.width, widthOf(right))
	room := s.width - end
	if end > 0 && len(left) > 0 {
		room = max(0, room-1)
	}
	used := s.write(&b, left, room)
	b.WriteString(strings.Repeat(" ", s.width-end-used))
	s.write(&b, right, end)
	return strings.TrimRight(b.String(), " ")
}

func widthOf(spans []span) int {
	width := 0
	for _, p := range spans {
		width += cells(p.text)
	}
	return width
}

// write writes pieces as far as there is room, and tells how much they took.
func (s *State) write(b *strings.Builder, spans []span, room int) int {
	used := 0
	for _, p := range spans {
		text := s.cut(p.text, room-used)
		b.WriteString(s.paint(p.code, text))
		used += cells(text)
		if text != p.text {
			break
		}
	}
	return used
}

// bar draws how full something is.
func (s *State) bar(m measure, width int) []span {
	full, half, empty := "━", "╸", "─"
	if s.settings.ASCII {
		full, half, empty = "#", "", "."
	}
	if !m.known {
		return []span{{plain, strings.Repeat(" ", width)}}
	}
	halves := int(m.part()*float64(2*width) + 0.5)
	if m.used > 0 && halves == 0 {
		halves = 1 // what is not empty does not look so
	}
	done, text := halves/2, strings.Repeat(full, halves/2)
	if halves%2 == 1 {
		done++
		if half == "" {
			half = full
		}
		text += half
	}
	return []span{{fullness(m), text}, {faint, strings.Repeat(empty, max(0, width-done))}}
}

// fullness is the colour of a bar.
func fullness(m measure) string {
	switch {
	case m.part() >= 0.9:
		return red
	case m.part() >= 0.8:
		return yellow
	default:
		return green
	}
}

// wrap breaks a text into lines of a width, at spaces where it can.
func wrap(text string, width int) []string {
	return strings.Split(ansi.Wrap(text, max(1, width), " /,"), "\n")
}
