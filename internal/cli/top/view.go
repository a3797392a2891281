package top

import (
	"fmt"
	"strings"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/cli/show"
)

// View draws the state.
func (s *State) View() string {
	var lines []string
	switch s.page {
	case pageHelp:
		lines = helpPage(s.canvas)
	case pageDetail:
		lines = newSheet(s).page()
	default:
		lines = newListView(s).page()
	}
	return strings.Join(lines[:min(len(lines), s.canvas.height)], "\n")
}

// listView draws the page with the list of volumes.
type listView struct {
	s      *State
	canvas canvas
	table  *table
}

func newListView(s *State) *listView {
	return &listView{s: s, canvas: s.canvas, table: newTable(s)}
}

func (v *listView) page() []string {
	f := v.s.frame()
	lines := make([]string, 0, v.canvas.height)
	add := func(shown bool, line func() string) {
		if shown {
			lines = append(lines, line())
		}
	}
	v.table.layout()
	add(f.title, func() string { return v.canvas.line(v.title(), freshness(v.s)...) })
	add(f.totals, func() string { return v.canvas.line(v.totals(), v.health()...) })
	add(f.sum, v.sumLine)
	add(f.alert, func() string { return alertLine(v.s) })
	add(f.filter, v.filterLine)
	add(f.blank, func() string { return "" })
	add(f.heading, v.table.heading)
	lines = append(lines, v.rowLines(f.rows)...)
	add(f.message, v.messageLine)
	add(f.hints, func() string { return hintLine(v.s, listActions) })
	return lines
}

// rowLines are the rows on the screen, followed by empty lines.
func (v *listView) rowLines(height int) []string {
	lines := make([]string, height)
	list := &v.s.list
	for i, r := range list.visible(height) {
		lines[i] = v.table.row(r, list.top+i == list.cursor)
	}
	if len(list.rows) == 0 && height > 0 {
		lines[0] = v.canvas.line([]span{{faint, "  " + v.emptyText()}})
	}
	return lines
}

func (v *listView) emptyText() string {
	switch {
	case v.s.list.known > 0:
		return "No volume fits."
	case v.s.node.link.synced:
		return "No volumes."
	}
	return "..."
}

func (v *listView) title() []span {
	daemon := &v.s.node.daemon
	spans := []span{{bold, "crust-proxy"}}
	if daemon.version != "" {
		spans = append(spans, span{plain, " " + daemon.version})
	}
	if daemon.name != "" {
		spans = append(spans, span{plain, "  "}, span{bold, daemon.name})
	}
	if !daemon.started.IsZero() {
		spans = append(spans, span{faint, "  up " + age(v.s.now, daemon.started)})
	}
	return spans
}

// freshness tells how fresh the screen is.
func freshness(s *State) []span {
	clock := span{faint, "  " + s.now.Local().Format(time.TimeOnly)}
	switch {
	case s.node.link.away:
		return []span{{alarm, "AWAY"}, clock}
	case s.paused != nil:
		return []span{{yellow, "PAUSED"}, clock}
	case !s.node.link.synced:
		return []span{{yellow, "connecting"}, clock}
	}
	return []span{{green, "live"}, {faint, ", every " + s.settings.Interval.String()}, clock}
}

// totals counts the volumes in each state.
func (v *listView) totals() []span {
	states, counts := countStates(v.s.shown())
	spans := []span{{faint, "Volumes "}, {bold, fmt.Sprint(len(v.s.shown()))}}
	for _, state := range states {
		spans = append(spans, span{plain, fmt.Sprintf("  %d", counts[state])},
			span{show.StateColour(state), " " + strings.ToLower(show.StateName(state))})
	}
	return spans
}

// health counts the handlers and drivers that work.
func (v *listView) health() []span {
	daemon := &v.s.node.daemon
	if !daemon.checked {
		return nil
	}
	healthy, ready := " healthy", " ready"
	if v.canvas.width < 100 {
		healthy, ready = "", ""
	}
	spans := []span{{faint, "Handlers "}, outOf(daemon.healthy, daemon.handlers), {faint, healthy}}
	if daemon.frontEnabled {
		spans = append(spans, span{faint, "  Drivers "}, outOf(daemon.ready, daemon.drivers), span{faint, ready})
	}
	return spans
}

func outOf(fine, all int) span {
	code := green
	if fine < all {
		code = red
	}
	return span{code, fmt.Sprintf("%d/%d", fine, all)}
}

// sumLine shows the bytes of all volumes in the list together.
func (v *listView) sumLine() string {
	all, volumes := v.s.list.sum()
	if !all.known {
		return v.canvas.line([]span{{faint, "Usage   not known yet"}})
	}
	of := "in " + count(volumes, "volume")
	if unknown := len(v.s.list.rows) - volumes; unknown > 0 {
		of += fmt.Sprintf(", %d not known", unknown)
	}
	spans := append([]span{{faint, "Usage   "}}, v.canvas.bar(all, max(8, min(40, v.canvas.width/4)))...)
	return v.canvas.line(append(spans, span{plain, fmt.Sprintf(" %4s  %s  ", percent(all), sizes(all))}, span{faint, of}))
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// alertLine says that the screen is out of date, or what is wrong with the node.
func alertLine(s *State) string {
	link := &s.node.link
	if !link.away {
		problems := s.node.daemon.problems
		left := []span{{yellow, "! " + problems[0]}}
		if more := len(problems) - 1; more > 0 {
			return s.canvas.line(left, span{faint, fmt.Sprintf("+%d, see crustctl doctor", more)})
		}
		return s.canvas.line(left)
	}
	again := "again now"
	if wait := link.retry.Sub(s.now); wait >= time.Second {
		again = "again in " + show.Duration(wait)
	}
	return s.canvas.line([]span{{alarm, "! away " + age(s.now, link.since) + ", this is old: "}, {red, link.reason}}, span{faint, again})
}

func (v *listView) filterLine() string {
	s, filter := v.s, v.s.list.filter
	var left []span
	if filter.typed != nil {
		left = []span{{bold, "/" + *filter.typed}, {reverse, " "}}
	} else if filter.text != "" {
		left = []span{{faint, "Filter "}, {bold, filter.text}}
	}
	for _, flag := range []struct{ name, value string }{
		{"state", strings.ToLower(s.settings.State)}, {"driver", s.settings.Driver}, {"handler", s.settings.Handler},
	} {
		if flag.value != "" {
			left = append(left, span{faint, "  " + flag.name + " "}, span{bold, v.canvas.escape(flag.value)})
		}
	}
	return v.canvas.line(left, span{faint, fmt.Sprintf("%d of %d shown", len(s.list.rows), s.list.known)})
}

// messageLine shows the error of the volume under the cursor, or what a narrow
// list has no columns for.
func (v *listView) messageLine() string {
	r := v.s.list.current()
	if r == nil {
		return ""
	}
	position := span{faint, fmt.Sprintf("%d/%d", v.s.list.cursor+1, len(v.s.list.rows))}
	if r.err == "" {
		device := joined(" ", access(r.v.GetReadOnly()), r.v.GetFsType(), r.v.GetDevice())
		sandbox := ""
		if r.sandbox != "" {
			sandbox = "sandbox " + r.sandbox
		}
		return v.canvas.line([]span{{faint, joined(", ", r.driver, r.handler, sandbox, v.canvas.escape(device))}}, position)
	}
	when := ""
	if at := timeOf(r.v.GetLastErrorAt()); !at.IsZero() {
		when = age(v.s.now, at) + " ago: "
	}
	return v.canvas.line([]span{{faint, when}, {red, r.err}}, position)
}

// hintLine shows the keys of a page, or those that end the typing of a filter.
func hintLine(s *State, actions []action) string {
	if s.list.filter.typed != nil {
		return s.canvas.line([]span{{bold, "enter"}, {faint, " keep   "}, {bold, "esc"}, {faint, " as before   "}, {bold, "ctrl+u"}, {faint, " clear"}})
	}
	var spans []span
	for _, a := range append([]action{{binding: keyQuit}}, actions...) {
		help := a.binding.Help()
		switch {
		case help.Desc == "":
			continue
		case help.Desc == "scroll":
			help.Key = s.canvas.upDown
		case help.Desc == "pause" && s.paused != nil:
			help.Desc = "go on"
		}
		spans = append(spans, span{bold, help.Key}, span{faint, " " + help.Desc + "   "})
	}
	return s.canvas.line(spans)
}
