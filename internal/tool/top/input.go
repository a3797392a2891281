package top

import (
	"slices"

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
		{bind("help", "?", "h", "f1"), (*State).help},
		{bind("details", "enter", "right"), (*State).open},
		{bind("filter", "/"), func(s *State) { s.list.filter.edit() }},
		{bind("sort", "s"), func(s *State) { s.list.sortBy(s.list.order.next()) }},
		{bind("reverse", "r", "S"), func(s *State) { s.list.reversed = !s.list.reversed }},
		{bind("pause", "p", "space"), (*State).pause},
		{bind("", "esc"), func(s *State) { s.list.filter.text = "" }},
		{bind("", "up", "k"), func(s *State) { s.list.move(-1) }},
		{bind("", "down", "j"), func(s *State) { s.list.move(1) }},
		{bind("", "pgup", "ctrl+b"), func(s *State) { s.list.move(-max(1, s.frame().rows-1)) }},
		{bind("", "pgdown", "ctrl+f"), func(s *State) { s.list.move(max(1, s.frame().rows-1)) }},
		{bind("", "home", "g"), func(s *State) { s.list.home() }},
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
		{bind("help", "?", "h", "f1"), (*State).help},
		{bind("", "down", "j"), func(s *State) { s.scroll(1) }},
		{bind("", "pgup"), func(s *State) { s.scroll(-s.canvas.height / 2) }},
		{bind("", "pgdown"), func(s *State) { s.scroll(s.canvas.height / 2) }},
		{bind("", "home", "g"), func(s *State) { s.scroll(-s.detail.top) }},
		{bind("", "end", "G"), func(s *State) { s.scroll(unbounded) }},
	}
)

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
