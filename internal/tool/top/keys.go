package top

import (
	"slices"
	"strings"

	"charm.land/bubbles/v2/key"
)

// action is what keys do. Those with a help text are shown at the foot of the page.
type action struct {
	binding key.Binding
	do      func(*State)
}

// bind binds keys; the first one stands for them in the help.
func bind(does string, keys ...string) key.Binding {
	return key.NewBinding(key.WithKeys(keys...), key.WithHelp(keys[0], does))
}

var (
	keyInterrupt = bind("", "ctrl+c")
	keySuspend   = bind("", "ctrl+z")
	keyQuit      = bind("quit", "q")

	// typingActions are only shown: filter.key does them.
	typingActions = []action{
		{binding: bind("keep", "enter")}, {binding: bind("as before", "esc")}, {binding: bind("clear", "ctrl+u")},
	}

	listActions = []action{
		{bind("help", "?", "h", "f1"), showHelp},
		{bind("details", "enter", "right"), (*State).open},
		{bind("filter", "/"), startFilter},
		{bind("sort", "s"), func(s *State) { s.list.sortBy((s.list.order + 1) % Order(len(orders))) }},
		{bind("reverse", "r", "S"), func(s *State) { s.list.reversed = !s.list.reversed }},
		{bind("pause", "p", "space"), (*State).pause},
		{bind("", "esc"), func(s *State) { s.list.filter.text = "" }},
		{bind("", "up", "k"), func(s *State) { s.list.move(-1) }},
		{bind("", "down", "j"), func(s *State) { s.list.move(1) }},
		{bind("", "pgup", "ctrl+b"), func(s *State) { s.list.move(-max(1, s.frame().rows-1)) }},
		{bind("", "pgdown", "ctrl+f"), func(s *State) { s.list.move(max(1, s.frame().rows-1)) }},
		{bind("", "home", "g"), goHome},
		{bind("", "end", "G"), func(s *State) { s.list.move(len(s.list.rows)) }},
		{bind("", "u"), func(s *State) { s.list.sortBy(ByUsage) }},
		{bind("", "l"), func(s *State) { s.list.sortBy(ByLatency) }},
		{bind("", "a"), func(s *State) { s.list.sortBy(ByAge) }},
		{bind("", "t"), func(s *State) { s.list.sortBy(ByState) }},
		{bind("", "n"), func(s *State) { s.list.sortBy(ByName) }},
	}

	detailActions = []action{
		{bind("back", "esc", "left", "backspace", "enter"), func(s *State) { s.page = pageList }},
		{bind("ask now", "r"), func(s *State) { s.schedule.fetchNow(s.detail.id) }},
		{bind("pause", "p", "space"), (*State).pause},
		{bind("scroll", "up", "k"), func(s *State) { s.scroll(-1) }},
		{bind("help", "?", "h", "f1"), showHelp},
		{bind("", "down", "j"), func(s *State) { s.scroll(1) }},
		{bind("", "pgup"), func(s *State) { s.scroll(-s.canvas.height / 2) }},
		{bind("", "pgdown"), func(s *State) { s.scroll(s.canvas.height / 2) }},
		{bind("", "home", "g"), func(s *State) { s.scroll(-s.detail.top) }},
		{bind("", "end", "G"), func(s *State) { s.scroll(unbounded) }},
	}
)

func showHelp(s *State) { s.page, s.back = pageHelp, s.page }

func startFilter(s *State) {
	text := s.list.filter.text
	s.list.filter.typed = &text
}

// goHome moves the cursor to the first row, whichever volume that is.
func goHome(s *State) { s.list.cursor, s.list.chosen = 0, "" }

// key does what a key is for on the page. Only ending and suspending is left to others.
func (s *State) key(k Key) Effect {
	switch {
	case key.Matches(k, keyInterrupt):
		return Quit{}
	case key.Matches(k, keySuspend):
		return Suspend{}
	case s.list.filter.typed != nil:
		s.list.filter.key(k, s.canvas.escape)
	case key.Matches(k, keyQuit):
		return Quit{}
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
	if i := slices.IndexFunc(actions, func(a action) bool { return key.Matches(k, a.binding) }); i >= 0 {
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
