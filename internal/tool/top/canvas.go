package top

import (
	"cmp"
	"strings"

	"github.com/charmbracelet/x/ansi"

	"github.com/crust-proxy/crust-proxy/internal/tool/show"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// charset holds the characters to draw with, and the function that escapes text
// from outside so that the terminal can show it.
type charset struct {
	escape                     func(string) string
	ellipsis, marker           string
	descending, ascending      string
	micro, upDown              string
	barFull, barHalf, barEmpty string
	spark                      []rune
}

var (
	unicodeCharset = charset{
		escape: show.EscapeCell, ellipsis: "…", marker: "▸", descending: "▾", ascending: "▴", micro: "µs", upDown: "↑↓",
		barFull: "━", barHalf: "╸", barEmpty: "─", spark: []rune("▁▂▃▄▅▆▇█"),
	}
	asciiCharset = charset{
		escape: show.EscapeASCII, ellipsis: "~", marker: ">", descending: "v", ascending: "^", micro: "us", upDown: "up/down",
		barFull: "#", barHalf: "#", barEmpty: ".", spark: []rune(".:-=+*#@"),
	}
)

type canvas struct {
	charset
	width, height int
	// plain draws without colours and attributes.
	plain bool
}

func (c canvas) paint(code, text string) string {
	if code == show.Plain || text == "" || c.plain {
		return text
	}
	return code + text + show.Reset
}

// cells is how many cells of the terminal a text takes. Most texts are plain ASCII, for
// which it need not look at characters and colours.
func cells(text string) int {
	for i := range len(text) {
		if text[i] < ' ' || text[i] >= 0x80 {
			return ansi.StringWidth(text)
		}
	}
	return len(text)
}

func (c canvas) cut(text string, width int) string {
	if cells(text) <= width {
		return text
	}
	return ansi.Truncate(text, max(0, width), c.ellipsis)
}

// fit cuts or pads a text to exactly a width.
func (c canvas) fit(text string, width int, right bool) string {
	text = c.cut(text, width)
	space := strings.Repeat(" ", max(0, width-cells(text)))
	return show.Either(right, space+text, text+space)
}

// line joins texts to a line of the screen's width, with one more at its right end. That
// one keeps its room; the others are cut.
func (c canvas) line(right string, left ...string) string {
	room := c.width
	if right != "" {
		right = c.cut(right, c.width)
		room -= cells(right) + 1
	}
	text, used := "", 0
	for _, part := range left {
		shown := c.cut(part, room-used)
		text, used = text+shown, used+cells(shown)
		if shown != part {
			break
		}
	}
	if right != "" {
		text += strings.Repeat(" ", max(0, room+1-used)) + right
	}
	return strings.TrimRight(text, " ")
}

func (c canvas) bar(u *adminv1.VolumeUsage, width int) string {
	if u == nil {
		return strings.Repeat(" ", width)
	}
	halves := int(part(u)*float64(2*width) + 0.5)
	if u.GetUsed() > 0 && halves == 0 {
		halves = 1 // anything in use is visible
	}
	text := strings.Repeat(c.barFull, halves/2) + strings.Repeat(c.barHalf, halves%2)
	return c.paint(fullness(u), text) + c.paint(show.Faint, strings.Repeat(c.barEmpty, max(0, width-(halves+1)/2)))
}

func fullness(u *adminv1.VolumeUsage) string {
	return cmp.Or(show.When(part(u) >= 0.9, show.Red), show.When(part(u) >= 0.8, show.Yellow), show.Green)
}

func wrap(text string, width int) []string {
	return strings.Split(ansi.Wrap(text, max(1, width), " /,"), "\n")
}

// hanging breaks a text into lines that begin below the first one's text.
func (c canvas) hanging(first, text string) []string {
	indent := cells(first)
	lines := wrap(text, c.width-indent)
	for i, line := range lines {
		lines[i] = show.Either(i == 0, first, strings.Repeat(" ", indent)) + line
	}
	return lines
}
