package top

import (
	"fmt"
	"strings"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/ctl/show"
)

// View draws the state.
func (s *State) View() string {
	var lines []string
	switch s.page {
	case pageHelp:
		lines = s.helpPage()
	case pageDetail:
		lines = s.detailPage()
	default:
		lines = s.listPage()
	}
	return strings.Join(lines[:min(len(lines), s.height)], "\n")
}

func (s *State) listPage() []string {
	f := s.frame()
	lines := make([]string, 0, s.height)
	add := func(wanted bool, line func() string) {
		if wanted {
			lines = append(lines, line())
		}
	}
	widths := s.layout()
	add(f.title, s.titleLine)
	add(f.totals, s.totalsLine)
	add(f.sum, s.sumLine)
	add(f.alert, s.alertLine)
	add(f.filter, s.filterLine)
	add(f.blank, func() string { return "" })
	add(f.heading, func() string { return s.heading(widths) })
	lines = append(lines, s.rowLines(f.rows, widths)...)
	add(f.message, s.messageLine)
	add(f.hints, func() string { return s.hintLine(listHints) })
	return lines
}

// rowLines are the rows on the screen, filled up with empty lines.
func (s *State) rowLines(height int, widths [columnCount]int) []string {
	lines := make([]string, 0, height)
	rows := s.list.rows[min(s.list.top, len(s.list.rows)):]
	for i, r := range rows[:min(height, len(rows))] {
		lines = append(lines, s.row(r, widths, s.list.top+i == s.list.cursor))
	}
	if len(rows) == 0 && height > 0 {
		lines = append(lines, s.line([]span{{faint, "  " + s.emptyText()}}, nil))
	}
	for len(lines) < height {
		lines = append(lines, "")
	}
	return lines
}

func (s *State) emptyText() string {
	switch {
	case s.list.known > 0:
		return "No volume fits."
	case s.link.synced:
		return "No volumes."
	}
	return "..."
}

func (s *State) titleLine() string {
	left := []span{{bold, "crust-proxy"}}
	if s.node.version != "" {
		left = append(left, span{plain, " " + s.node.version})
	}
	if s.node.name != "" {
		left = append(left, span{plain, "  "}, span{bold, s.node.name})
	}
	if !s.node.started.IsZero() {
		left = append(left, span{faint, "  up " + s.age(s.node.started)})
	}
	return s.line(left, s.pace())
}

// pace tells how fresh the picture is.
func (s *State) pace() []span {
	clock := span{faint, "  " + s.now.Local().Format(time.TimeOnly)}
	switch {
	case s.link.away:
		return []span{{alarm, "AWAY"}, clock}
	case s.paused != nil:
		return []span{{yellow, "PAUSED"}, clock}
	case !s.link.synced:
		return []span{{yellow, "connecting"}, clock}
	}
	return []span{{green, "live"}, {faint, ", every " + s.settings.Interval.String()}, clock}
}

func (s *State) totalsLine() string {
	names, counts := s.byState()
	left := []span{{faint, "Volumes "}, {bold, fmt.Sprint(len(s.picture()))}}
	for _, name := range names {
		left = append(left, span{plain, "  "}, span{plain, fmt.Sprint(counts[name])}, span{s.codeOf(name), " " + strings.ToLower(name)})
	}
	return s.line(left, s.parts())
}

// codeOf is the colour of a state by its name.
func (s *State) codeOf(state string) string {
	for _, r := range s.picture() {
		if r.state == state {
			return show.StateColour(r.v.GetState())
		}
	}
	return plain
}

// parts are handlers and drivers.
func (s *State) parts() []span {
	if !s.node.health {
		return nil
	}
	spans := []span{{faint, "Handlers "}, outOf(s.node.fine, s.node.handlers)}
	if s.width >= 100 {
		spans = append(spans, span{faint, " healthy"})
	}
	if s.node.frontOn {
		spans = append(spans, span{faint, "  Drivers "}, outOf(s.node.ready, s.node.drivers))
		if s.width >= 100 {
			spans = append(spans, span{faint, " ready"})
		}
	}
	return spans
}

func outOf(fine, all int) span {
	text := fmt.Sprintf("%d/%d", fine, all)
	if fine < all {
		return span{red, text}
	}
	return span{green, text}
}

func (s *State) sumLine() string {
	all, volumes := s.sum()
	if !all.known {
		return s.line([]span{{faint, "Usage   not known yet"}}, nil)
	}
	of := "in " + count(volumes, "volume")
	if unknown := len(s.list.rows) - volumes; unknown > 0 {
		of += fmt.Sprintf(", %d not known", unknown)
	}
	left := []span{{faint, "Usage   "}}
	left = append(left, s.bar(all, max(8, min(40, s.width/4)))...)
	left = append(left, span{plain, fmt.Sprintf(" %4s  ", percent(all))},
		span{plain, sizes(all) + "  "}, span{faint, of})
	return s.line(left, nil)
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// alertLine says that the picture is old, or what is wrong with the node.
func (s *State) alertLine() string {
	if !s.link.away {
		text := s.node.problems[0]
		if more := len(s.node.problems) - 1; more > 0 {
			return s.line([]span{{yellow, "! " + text}}, []span{{faint, fmt.Sprintf("+%d, see crustctl doctor", more)}})
		}
		return s.line([]span{{yellow, "! " + text}}, nil)
	}
	again := "again now"
	if wait := s.link.retry.Sub(s.now); wait >= time.Second {
		again = "again in " + show.Duration(wait)
	}
	return s.line([]span{{alarm, "! away " + show.Duration(s.now.Sub(s.link.since)) + ", this is old: "}, {red, s.link.reason}},
		[]span{{faint, again}})
}

func (s *State) filterLine() string {
	var left []span
	if s.input != nil {
		left = []span{{bold, "/" + *s.input}, {reverse, " "}}
	} else if s.filter != "" {
		left = []span{{faint, "Filter "}, {bold, s.filter}}
	}
	for _, flag := range []struct{ name, value string }{
		{"state", strings.ToLower(s.settings.State)}, {"driver", s.settings.Driver}, {"handler", s.settings.Handler},
	} {
		if flag.value != "" {
			left = append(left, span{faint, "  " + flag.name + " "}, span{bold, s.clean(flag.value)})
		}
	}
	return s.line(left, []span{{faint, fmt.Sprintf("%d of %d shown", len(s.list.rows), s.list.known)}})
}

// messageLine is what is wrong with the volume under the cursor, or where in the
// list it is.
func (s *State) messageLine() string {
	r := s.current()
	if r == nil {
		return ""
	}
	place := []span{{faint, fmt.Sprintf("%d/%d", s.list.cursor+1, len(s.list.rows))}}
	if r.err == "" {
		return s.line([]span{{faint, s.summary(r)}}, place)
	}
	when := ""
	if at := timeOf(r.v.GetLastErrorAt()); !at.IsZero() {
		when = s.age(at) + " ago: "
	}
	return s.line([]span{{faint, when}, {red, r.err}}, place)
}

// summary is what a narrow list has no columns for.
func (s *State) summary(r *row) string {
	sandbox := ""
	if r.sandbox != "" {
		sandbox = "sandbox " + r.sandbox
	}
	device := s.clean(joined(" ", r.v.GetFsType(), r.v.GetDevice()))
	return joined(", ", r.driver, r.handler, sandbox, access(r.v.GetReadOnly())+" "+device)
}

// hint is a key and what it does.
type hint struct{ key, does string }

var listHints = []hint{
	{"q", "quit"}, {"?", "help"}, {"enter", "details"}, {"/", "filter"}, {"s", "sort"}, {"r", "reverse"}, {"p", "pause"},
}

func (s *State) hintLine(hints []hint) string {
	var spans []span
	for _, h := range hints {
		if s.paused != nil && h.key == "p" {
			h.does = "go on"
		}
		spans = append(spans, span{bold, h.key}, span{faint, " " + h.does + "   "})
	}
	if s.input != nil {
		spans = []span{{bold, "enter"}, {faint, " keep   "}, {bold, "esc"}, {faint, " as before   "}, {bold, "ctrl+u"}, {faint, " clear"}}
	}
	return s.line(spans, nil)
}
