package top

import (
	"slices"
	"strings"

	"github.com/crust-proxy/crust-proxy/internal/tool/show"
)

// action is what keys do, which are separated by spaces. Those with a help text are shown at the foot of the page, by
// the first key.
type action struct {
	keys, help string
	do         func(*State)
}

func (a action) has(name string) bool { return slices.Contains(strings.Fields(a.keys), name) }

var (
	quitAction = action{keys: "q", help: "quit"} // key does it

	// typingActions are only shown: filter.key does them.
	typingActions = []action{{keys: "enter", help: "keep"}, {keys: "esc", help: "as before"}, {keys: "ctrl+u", help: "clear"}}

	listActions = []action{
		{"? h f1", "help", showHelp},
		{"enter right", "details", (*State).open},
		{"/", "filter", func(s *State) { s.list.filter.typed = new(s.list.filter.text) }},
		{"s", "sort", func(s *State) { s.list.sortBy((s.list.order + 1) % Order(len(orders))) }},
		{"r S", "reverse", func(s *State) { s.list.reversed = !s.list.reversed }},
		{"p space", "pause", (*State).pause},
		{"esc", "", func(s *State) { s.list.filter.text = "" }},
		{"up k", "", func(s *State) { s.list.move(-1) }},
		{"down j", "", func(s *State) { s.list.move(1) }},
		{"pgup ctrl+b", "", func(s *State) { s.list.move(-max(1, s.frame().rows-1)) }},
		{"pgdown ctrl+f", "", func(s *State) { s.list.move(max(1, s.frame().rows-1)) }},
		{"home g", "", func(s *State) { s.list.cursor, s.list.chosen = 0, "" }},
		{"end G", "", func(s *State) { s.list.move(len(s.list.rows)) }},
		{"u", "", func(s *State) { s.list.sortBy(ByUsage) }},
		{"l", "", func(s *State) { s.list.sortBy(ByLatency) }},
		{"a", "", func(s *State) { s.list.sortBy(ByAge) }},
		{"t", "", func(s *State) { s.list.sortBy(ByState) }},
		{"n", "", func(s *State) { s.list.sortBy(ByName) }},
	}

	detailActions = []action{
		{"esc left backspace enter", "back", func(s *State) { s.page = pageList }},
		{"r", "ask now", func(s *State) { s.schedule.fetchNow(s.detail.id) }},
		{"p space", "pause", (*State).pause},
		{"up k", "scroll", func(s *State) { s.scroll(-1) }},
		{"? h f1", "help", showHelp},
		{"down j", "", func(s *State) { s.scroll(1) }},
		{"pgup", "", func(s *State) { s.scroll(-s.canvas.height / 2) }},
		{"pgdown", "", func(s *State) { s.scroll(s.canvas.height / 2) }},
		{"home g", "", func(s *State) { s.scroll(-s.detail.top) }},
		{"end G", "", func(s *State) { s.scroll(unbounded) }},
	}
)

func showHelp(s *State) { s.page, s.back = pageHelp, s.page }

// key does what a key is for on the page. Only ending and suspending is left to others.
func (s *State) key(k Key) Effect {
	switch typing := s.list.filter.typed != nil; {
	case k.Name == "ctrl+c" || quitAction.has(k.Name) && !typing:
		return Quit{}
	case k.Name == "ctrl+z":
		return Suspend{}
	case typing:
		s.list.filter.key(k, s.canvas.escape)
	case s.page == pageHelp:
		s.page = s.back
	case s.page == pageDetail:
		s.do(k, detailActions)
	default:
		s.do(k, listActions)
	}
	return nil
}

func (s *State) do(k Key, actions []action) {
	if i := slices.IndexFunc(actions, func(a action) bool { return a.has(k.Name) }); i >= 0 {
		actions[i].do(s)
	}
}

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
	page[c.height-1] = c.paint(show.Faint, "any key: back"+show.When(len(lines) >= c.height, "; the rest needs more lines"))
	for i := range page {
		page[i] = c.line("", page[i])
	}
	return page
}

// helpText is the page as long as it is: each key, with its text beside it in as many lines as that takes.
func helpText(c canvas) []string {
	page := []string{c.paint(show.Bold, "crustctl top") + c.paint(show.Faint, "  keys")}
	for line := range strings.SplitSeq(helpKeys+helpMarks, "\n") {
		if line == "" {
			page = append(page, "")
			continue
		}
		lines := c.hanging(line[:helpIndent], line[helpIndent:])
		lines[0] = c.paint(show.Bold, line[:helpIndent]) + lines[0][helpIndent:]
		page = append(page, lines...)
	}
	return page
}
