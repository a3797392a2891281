package top

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// mostTyped bounds a filter.
const mostTyped = 120

func (e Key) apply(s *State) []Effect {
	switch {
	case e.Name == "ctrl+c":
		return []Effect{Quit{}}
	case e.Name == "ctrl+z":
		return []Effect{Suspend{}}
	case s.input != nil:
		s.typed(e)
		return s.due()
	case s.page == pageHelp:
		return s.helpKey(e)
	case s.page == pageDetail:
		return s.detailKey(e)
	}
	return s.listKey(e)
}

// typed edits the filter; what it finds is shown at once.
func (s *State) typed(e Key) {
	text := *s.input
	switch e.Name {
	case "esc":
		s.input = nil
		s.rebuild()
		return
	case "enter":
		s.filter, s.input = strings.TrimSpace(text), nil
		s.rebuild()
		return
	case "backspace":
		_, size := utf8.DecodeLastRuneInString(text)
		text = text[:len(text)-size]
	case "ctrl+u":
		text = ""
	case "ctrl+w":
		text = strings.TrimRightFunc(strings.TrimRightFunc(text, unicode.IsSpace), func(r rune) bool { return !unicode.IsSpace(r) })
	default:
		text += s.clean(e.Text)
	}
	for utf8.RuneCountInString(text) > mostTyped {
		_, size := utf8.DecodeLastRuneInString(text)
		text = text[:len(text)-size]
	}
	s.input = &text
	s.rebuild()
}

func (s *State) listKey(e Key) []Effect {
	page := max(1, s.frame().rows-1)
	switch e.Name {
	case "q":
		return []Effect{Quit{}}
	case "?", "h", "f1":
		s.page, s.detail.from = pageHelp, pageList
	case "up", "k":
		s.move(-1)
	case "down", "j":
		s.move(1)
	case "pgup", "ctrl+b":
		s.move(-page)
	case "pgdown", "ctrl+f":
		s.move(page)
	case "end", "G":
		s.move(len(s.list.rows))
	case "home", "g":
		s.home()
	case "enter", "right":
		s.open()
	case "esc":
		s.filter = ""
		s.rebuild()
	case "/":
		text := s.filter
		s.input = &text
	default:
		return s.commonKey(e)
	}
	return s.due()
}

// open shows all of the volume under the cursor, with numbers as of now.
func (s *State) open() {
	r := s.current()
	if r == nil {
		return
	}
	s.list.chosen = r.id()
	s.page, s.detail = pageDetail, detail{id: r.id()}
	s.askOf(r.id()).next = s.now
}

func (s *State) detailKey(e Key) []Effect {
	switch e.Name {
	case "q":
		return []Effect{Quit{}}
	case "esc", "left", "backspace", "enter":
		s.page = pageList
	case "?", "h", "f1":
		s.page, s.detail.from = pageHelp, pageDetail
	case "up", "k":
		s.detail.top--
	case "down", "j":
		s.detail.top++
	case "pgup":
		s.detail.top -= s.height / 2
	case "pgdown":
		s.detail.top += s.height / 2
	case "home", "g":
		s.detail.top = 0
	case "end", "G":
		s.detail.top = len(s.detailLines())
	case "r":
		return s.askNow(s.detail.id)
	case "p", "space":
		s.pause()
	}
	s.detail.top = max(0, min(s.detail.top, len(s.detailLines())-s.detailRows()))
	return s.due()
}

func (s *State) helpKey(e Key) []Effect {
	if e.Name == "q" {
		return []Effect{Quit{}}
	}
	s.page = s.detail.from
	return s.due()
}

// commonKey is what changes the order and the pace.
func (s *State) commonKey(e Key) []Effect {
	switch e.Name {
	case "s":
		s.sortBy(s.order.next())
	case "S", "r":
		s.up = !s.up
		s.rebuild()
	case "u":
		s.sortBy(ByUsage)
	case "l":
		s.sortBy(ByLatency)
	case "a":
		s.sortBy(ByAge)
	case "t":
		s.sortBy(ByState)
	case "n":
		s.sortBy(ByName)
	case "p", "space":
		s.pause()
	}
	return s.due()
}

func (s *State) sortBy(o Order) {
	s.order, s.up = o, false
	s.rebuild()
}

// pause stops the picture and the questions; what the daemon tells meanwhile is
// shown when it goes on.
func (s *State) pause() {
	if s.paused != nil {
		s.paused = nil
		s.rebuild()
		return
	}
	s.paused = make(map[string]*row, len(s.volumes))
	for id, r := range s.volumes {
		s.paused[id] = r
	}
}
