package top

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/crust-proxy/crust-proxy/internal/tool/show"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// list is the list of volumes: which are in it, their order, and the cursor.
type list struct {
	rows     []*row
	known    int // the volumes before the filter
	filter   filter
	order    Order
	reversed bool
	cursor   int
	top      int    // the first row on the screen
	chosen   string // the volume that the cursor stays on; empty is none
}

// rebuild filters and sorts the volumes. state selects those in one state; "" selects all. The
// cursor stays on the chosen volume; if none is chosen, it stays where it is in the list.
func (l *list) rebuild(all map[string]*row, state string) {
	words := strings.Fields(strings.ToLower(l.filter.current()))
	l.rows, l.known = make([]*row, 0, len(all)), len(all)
	for _, r := range all {
		lacks := func(word string) bool { return !strings.Contains(r.words, word) }
		if (state == "" || r.state == state) && !slices.ContainsFunc(words, lacks) {
			l.rows = append(l.rows, r)
		}
	}
	l.order.sort(l.rows, l.reversed)
	if i := slices.IndexFunc(l.rows, func(r *row) bool { return r.id() == l.chosen }); i >= 0 {
		l.cursor = i
	}
	l.cursor = max(0, min(l.cursor, len(l.rows)-1))
}

func (l *list) scroll(height int) {
	l.top = max(l.cursor-height+1, min(l.top, l.cursor))
	l.top = max(0, min(l.top, len(l.rows)-height))
}

func (l *list) move(by int) {
	l.cursor = max(0, min(l.cursor+by, len(l.rows)-1))
	if r := l.current(); r != nil {
		l.chosen = r.id()
	}
}

func (l *list) current() *row {
	if l.cursor >= len(l.rows) {
		return nil
	}
	return l.rows[l.cursor]
}

func (l *list) visible(height int) []*row {
	return l.rows[min(l.top, len(l.rows)):min(l.top+height, len(l.rows))]
}

func (l *list) sortBy(o Order) { l.order, l.reversed = o, false }

const maxFilter = 120 // characters

type filter struct {
	text  string
	typed *string // replaces text while the user types
}

func (f *filter) current() string {
	if f.typed != nil {
		return *f.typed
	}
	return f.text
}

func (f *filter) key(k Key, escape func(string) string) {
	text := *f.typed
	switch k.Name {
	case "esc":
		f.typed = nil
		return
	case "enter":
		f.text, f.typed = strings.TrimSpace(text), nil
		return
	case "backspace":
		_, size := utf8.DecodeLastRuneInString(text)
		text = text[:len(text)-size]
	case "ctrl+u":
		text = ""
	case "ctrl+w":
		text = strings.TrimRightFunc(text, unicode.IsSpace)
		text = strings.TrimRightFunc(text, func(r rune) bool { return !unicode.IsSpace(r) })
	default:
		text += escape(k.Text)
	}
	if letters := []rune(text); len(letters) > maxFilter {
		text = string(letters[:maxFilter])
	}
	f.typed = &text
}

// Order is what the list is sorted by.
type Order uint8

// The orders. Each begins with what needs attention most, ByName is alphabetic.
const (
	ByUsage Order = iota
	ByLatency
	ByAge
	ByState
	ByName
)

// orders say how each order compares rows, and which column it is marked at. Rows for
// which it is not known come last, also in the reverse order.
var orders = [...]struct {
	name    string
	column  int
	compare func(a, b *row) int
	known   func(*row) bool // nil is always
}{
	ByUsage: {"usage", colUsage, func(a, b *row) int {
		return cmp.Or(cmp.Compare(part(b.bytes), part(a.bytes)), cmp.Compare(b.bytes.GetUsed(), a.bytes.GetUsed()))
	}, func(r *row) bool { return r.bytes != nil }},
	ByLatency: {"latency", colStats, func(a, b *row) int { return cmp.Compare(b.took, a.took) }, (*row).timed},
	ByAge:     {"age", colAge, func(a, b *row) int { return b.created.Compare(a.created) }, nil},
	ByState:   {"state", colState, func(a, b *row) int { return urgency[a.v.GetState()] - urgency[b.v.GetState()] }, nil},
	ByName:    {"name", colName, byName, nil},
}

func byName(a, b *row) int {
	return cmp.Or(cmp.Compare(a.name, b.name), cmp.Compare(a.pod, b.pod), cmp.Compare(a.id(), b.id()))
}

func (o Order) String() string { return orders[o].name }

// OrderNames are the names of the orders.
func OrderNames() (names []string) {
	for _, o := range orders {
		names = append(names, o.name)
	}
	return names
}

// ParseOrder reads an order.
func ParseOrder(text string) (Order, error) {
	i := slices.Index(OrderNames(), text)
	if i < 0 {
		return 0, fmt.Errorf("--sort %q is none of %s", text, strings.Join(OrderNames(), ", "))
	}
	return Order(i), nil //nolint:gosec // one of five
}

func (o Order) sort(rows []*row, reversed bool) {
	compare, known := orders[o].compare, orders[o].known
	slices.SortFunc(rows, func(a, b *row) int {
		if known != nil && known(a) != known(b) {
			return show.Either(known(a), -1, 1)
		}
		c := compare(a, b)
		return cmp.Or(show.Either(reversed, -c, c), byName(a, b))
	})
}

// urgency ranks the states, the one that needs attention most first. A degraded
// volume has rank 0, as has a state that only a newer daemon knows.
var urgency = map[adminv1.VolumeState]int{
	adminv1.VolumeState_VOLUME_STATE_REFUSED:   1,
	adminv1.VolumeState_VOLUME_STATE_HELD:      1,
	adminv1.VolumeState_VOLUME_STATE_REMOVING:  2,
	adminv1.VolumeState_VOLUME_STATE_PUBLISHED: 3,
	adminv1.VolumeState_VOLUME_STATE_BOUND:     4,
	adminv1.VolumeState_VOLUME_STATE_ADOPTED:   5,
}
