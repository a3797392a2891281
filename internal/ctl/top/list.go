package top

import (
	"slices"
	"strings"
)

// rebuild makes the list of what is known, by filter and order.
func (s *State) rebuild() {
	all := s.picture()
	words := strings.Fields(strings.ToLower(s.shownFilter()))
	rows := make([]*row, 0, len(all))
	for _, r := range all {
		if s.shows(r, words) {
			rows = append(rows, r)
		}
	}
	s.order.sort(rows, s.up)
	s.list.rows, s.list.known = rows, len(all)
	s.list.natural = s.naturalWidths(rows)
	s.settle()
}

// shownFilter is the filter, or what it will be once it is typed.
func (s *State) shownFilter() string {
	if s.input != nil {
		return *s.input
	}
	return s.filter
}

// shows tells whether a volume has all words of the filter.
func (s *State) shows(r *row, words []string) bool {
	if s.settings.State != "" && r.state != s.settings.State {
		return false
	}
	return !slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(r.words, word) })
}

// settle puts the cursor back onto the volume that was chosen. Where none was, it
// stays at the top, whatever comes to stand there.
func (s *State) settle() {
	l := &s.list
	if l.chosen != "" {
		if i := slices.IndexFunc(l.rows, func(r *row) bool { return r.id() == l.chosen }); i >= 0 {
			l.cursor = i
		}
	}
	l.cursor = max(0, min(l.cursor, len(l.rows)-1))
	s.scroll()
}

// scroll moves the screen to where the cursor is.
func (s *State) scroll() {
	l, height := &s.list, s.frame().rows
	if l.cursor < l.top {
		l.top = l.cursor
	}
	if l.cursor >= l.top+height {
		l.top = l.cursor - height + 1
	}
	l.top = max(0, min(l.top, len(l.rows)-height))
}

// move moves the cursor by some rows.
func (s *State) move(by int) {
	l := &s.list
	if len(l.rows) == 0 {
		return
	}
	l.cursor = max(0, min(l.cursor+by, len(l.rows)-1))
	l.chosen = l.rows[l.cursor].id()
	s.scroll()
}

// home lets go of the chosen volume: the cursor is on whatever is first.
func (s *State) home() {
	s.list.cursor, s.list.chosen = 0, ""
	s.scroll()
}

// current is the volume under the cursor, or nil.
func (s *State) current() *row {
	if s.list.cursor >= len(s.list.rows) {
		return nil
	}
	return s.list.rows[s.list.cursor]
}

// onScreen are the volumes that can be seen.
func (s *State) onScreen() []*row {
	switch s.page {
	case pageDetail:
		if r := s.picture()[s.detail.id]; r != nil {
			return []*row{r}
		}
		return nil
	case pageHelp:
		return nil
	}
	l := s.list
	return l.rows[min(l.top, len(l.rows)):min(l.top+s.frame().rows, len(l.rows))]
}
