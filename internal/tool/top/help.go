package top

import (
	"slices"
	"strings"
)

// helpKeys are all keys, in two groups; helpMarks say what signs mean. A line begins
// with helpIndent cells of what it explains.
const (
	helpIndent = 21
	helpKeys   = `
  up, down, k, j     choose a volume
  pgup, pgdown       a page up or down
  home, g; end, G    to the first; to the last
  enter              all of the volume; esc: back
  /                  filter: all words must be in name, pod, state, ...
  esc                no filter

  u l a t n          sort by usage, latency, age, state, name
  s, r               sort by the next; turn the order round
  p, space           pause: the picture stands still, nobody is asked
  r                  on a volume's page: ask its sandbox now
  ?, h               this page
  ctrl+z; q, ctrl+c  suspend; quit
`
	helpMarks = `
  !                  before a volume: it has an error; before a time: the sandbox failed
  USED/SIZE          as the sandbox said last; it is asked only while it can be seen
  STATS              how long the sandbox took to answer`
)

func helpPage(c canvas) []string {
	lines := helpText(c)
	if len(lines) >= c.height {
		lines = slices.DeleteFunc(lines, func(line string) bool { return line == "" })
	}
	page := append(lines, make([]string, c.height)...)[:c.height]
	page[c.height-1] = c.paint(faint, "any key: back")
	for i := range page {
		page[i] = c.line("", page[i])
	}
	return page
}

// helpText is the page as long as it is: each key, with its text beside it in as many
// lines as that takes.
func helpText(c canvas) []string {
	page := []string{c.paint(bold, "crustctl top") + c.paint(faint, "  keys")}
	for line := range strings.SplitSeq(helpKeys+helpMarks, "\n") {
		if line == "" {
			page = append(page, "")
			continue
		}
		lines := c.hanging(line[:helpIndent], line[helpIndent:])
		lines[0] = c.paint(bold, line[:helpIndent]) + lines[0][helpIndent:]
		page = append(page, lines...)
	}
	return page
}
