package top

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/tool/show"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
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
		lines = newTable(s).page()
	}
	return strings.Join(lines[:min(len(lines), s.canvas.height)], "\n")
}

func (t *table) page() []string {
	f := t.s.frame()
	lines := make([]string, 0, t.s.canvas.height)
	add := func(shown bool, line func() string) {
		if shown {
			lines = append(lines, line())
		}
	}
	t.layout()
	add(f.title, func() string { return t.s.canvas.line(freshness(t.s), t.title()...) })
	add(f.totals, func() string { return t.s.canvas.line(t.health(), t.totals()...) })
	add(f.sum, t.sumLine)
	add(f.alert, func() string { return alertLine(t.s) })
	add(f.filter, t.filterLine)
	add(f.blank, func() string { return "" })
	add(f.heading, t.heading)
	lines = append(lines, t.rowLines(f.rows)...)
	add(f.message, t.messageLine)
	add(f.hints, func() string { return hintLine(t.s, listActions) })
	return lines
}

func (t *table) rowLines(height int) []string {
	lines := make([]string, height)
	list := &t.s.list
	for i, r := range list.visible(height) {
		lines[i] = t.row(r, list.top+i == list.cursor)
	}
	if len(list.rows) == 0 && height > 0 {
		lines[0] = t.s.canvas.line("", t.s.canvas.paint(show.Faint, "  "+t.emptyText()))
	}
	return lines
}

func (t *table) emptyText() string {
	return cmp.Or(show.When(t.s.list.known > 0, "No volume fits."), show.When(t.s.node.link.synced, "No volumes."), "...")
}

func (t *table) title() []string {
	daemon, paint := &t.s.node.daemon, t.s.canvas.paint
	return []string{
		paint(show.Bold, "crust-proxy"), show.When(daemon.version != "", " "+daemon.version),
		show.When(daemon.name != "", "  "), paint(show.Bold, daemon.name),
		paint(show.Faint, show.When(!daemon.started.IsZero(), "  up "+age(t.s.now, daemon.started))),
	}
}

func freshness(s *State) string {
	paint, clock := s.canvas.paint, "  "+s.now.Local().Format(time.TimeOnly)
	switch {
	case s.node.link.away:
		return paint(show.Alarm, "AWAY") + paint(show.Faint, clock)
	case s.hangs():
		return paint(show.Alarm, "NO ANSWER") + paint(show.Faint, clock)
	case s.paused != nil:
		return paint(show.Yellow, "PAUSED") + paint(show.Faint, clock)
	case !s.node.link.synced:
		return paint(show.Yellow, "connecting") + paint(show.Faint, clock)
	}
	return paint(show.Green, "live") + paint(show.Faint, ", every "+s.settings.Interval.String()+clock)
}

func (t *table) totals() []string {
	paint := t.s.canvas.paint
	counts := make(map[adminv1.VolumeState]int)
	for _, r := range t.s.shown() {
		counts[r.v.GetState()]++
	}
	states := slices.SortedFunc(maps.Keys(counts), func(a, b adminv1.VolumeState) int {
		return cmp.Or(urgency[a]-urgency[b], int(a-b))
	})
	texts := []string{paint(show.Faint, "Volumes "), paint(show.Bold, fmt.Sprint(len(t.s.shown())))}
	for _, state := range states {
		name := " " + strings.ToLower(show.StateName(state))
		texts = append(texts, fmt.Sprintf("  %d", counts[state]), paint(show.StateColour(state), name))
	}
	return texts
}

func (t *table) health() string {
	daemon, paint := &t.s.node.daemon, t.s.canvas.paint
	if !daemon.checked {
		return ""
	}
	wide := t.s.canvas.width >= 100
	return paint(show.Faint, "Handlers ") + t.outOf(daemon.handlers) + paint(show.Faint, show.When(wide, " healthy")) +
		show.When(daemon.frontEnabled, paint(show.Faint, "  Drivers ")+t.outOf(daemon.drivers)+paint(show.Faint, show.When(wide, " ready")))
}

func (t *table) outOf(n tally) string {
	return t.s.canvas.paint(show.Either(n.fine < n.all, show.Red, show.Green), fmt.Sprintf("%d/%d", n.fine, n.all))
}

func (t *table) sumLine() string {
	all, volumes, canvas, paint := &adminv1.VolumeUsage{}, 0, t.s.canvas, t.s.canvas.paint
	for _, r := range t.s.list.rows {
		if r.bytes != nil {
			all.Used += r.bytes.GetUsed()
			all.Total += r.bytes.GetTotal()
			volumes++
		}
	}
	if volumes == 0 {
		return canvas.line("", paint(show.Faint, "Usage   not known yet"))
	}
	unknown := len(t.s.list.rows) - volumes
	of := "in " + count(volumes, "volume") + show.When(unknown > 0, fmt.Sprintf(", %d not known", unknown))
	bar := canvas.bar(all, max(8, min(40, canvas.width/4)))
	return canvas.line("", paint(show.Faint, "Usage   "), bar, fmt.Sprintf(" %4s  %s  ", percent(all), sizes(all)), paint(show.Faint, of))
}

func count(n int, what string) string {
	return fmt.Sprintf("%d %s%s", n, what, show.When(n != 1, "s"))
}

// alertLine says that the screen is out of date, or what is wrong with the node.
func alertLine(s *State) string {
	link, paint := &s.node.link, s.canvas.paint
	if s.hangs() {
		return s.canvas.line("", paint(show.Alarm, "! no answer for "+age(s.now, s.schedule.silent)+", this is old: "),
			paint(show.Red, "the daemon is connected, and may hang"))
	}
	if !link.away {
		problems := s.node.daemon.problems
		more := show.When(len(problems) > 1, fmt.Sprintf("+%d, see crustctl doctor", len(problems)-1))
		return s.canvas.line(paint(show.Faint, more), paint(show.Yellow, "! "+problems[0]))
	}
	wait := link.retry.Sub(s.now)
	again := "again " + show.Either(wait >= time.Second, "in "+show.Duration(wait), "now")
	since := paint(show.Alarm, "! away "+age(s.now, link.since)+", this is old: ")
	return s.canvas.line(paint(show.Faint, again), since, paint(show.Red, link.reason))
}

func (t *table) filterLine() string {
	s, filter, paint := t.s, t.s.list.filter, t.s.canvas.paint
	var left []string
	if filter.typed != nil {
		left = []string{paint(show.Bold, "/"+*filter.typed), paint(show.Reverse, " ")}
	} else if filter.text != "" {
		left = []string{paint(show.Faint, "Filter "), paint(show.Bold, filter.text)}
	}
	for _, flag := range []struct{ name, value string }{
		{"state", strings.ToLower(s.settings.State)}, {"driver", s.settings.Driver}, {"handler", s.settings.Handler},
	} {
		if flag.value != "" {
			left = append(left, paint(show.Faint, "  "+flag.name+" "), paint(show.Bold, t.s.canvas.escape(flag.value)))
		}
	}
	return t.s.canvas.line(paint(show.Faint, fmt.Sprintf("%d of %d shown", len(s.list.rows), s.list.known)), left...)
}

// messageLine shows the error of the volume under the cursor, or the fields for which a narrow list has no columns.
func (t *table) messageLine() string {
	r, paint := t.s.list.current(), t.s.canvas.paint
	if r == nil {
		return ""
	}
	position := paint(show.Faint, fmt.Sprintf("%d/%d", t.s.list.cursor+1, len(t.s.list.rows)))
	if r.err == "" {
		device := show.Joined(" ", access(r.v.GetReadOnly()), r.v.GetFsType(), r.v.GetDevice())
		sandbox := show.When(r.sandbox != "", "sandbox "+r.sandbox)
		return t.s.canvas.line(position, paint(show.Faint, show.Joined(", ", r.driver, r.handler, sandbox, t.s.canvas.escape(device))))
	}
	at := timeOf(r.v.GetLastErrorAt())
	return t.s.canvas.line(position, paint(show.Faint, show.When(!at.IsZero(), age(t.s.now, at)+" ago: ")), paint(show.Red, r.err))
}

// hintLine shows the keys of a page, or those that end the typing of a filter.
func hintLine(s *State, actions []action) string {
	keys := append([]action{quitAction}, actions...)
	if s.list.filter.typed != nil {
		keys = typingActions
	}
	var texts []string
	for _, a := range keys {
		key, _, _ := strings.Cut(a.keys, " ")
		switch {
		case a.help == "":
			continue
		case a.help == "scroll":
			key = s.canvas.upDown
		case a.help == "pause" && s.paused != nil:
			a.help = "go on"
		}
		texts = append(texts, s.canvas.paint(show.Bold, key), s.canvas.paint(show.Faint, " "+a.help+"   "))
	}
	return s.canvas.line("", texts...)
}

// frame says which lines are shown around the rows of the list.
type frame struct {
	title, totals, sum, alert, filter, blank, heading, message, hints bool
	rows                                                              int
}

// fewestRows is what the other lines leave to the rows.
const fewestRows = 3

// frame chooses the lines that the screen has room for. The most important ones show that the
// list is incomplete or out of date.
func (s *State) frame() frame {
	f := frame{rows: s.canvas.height}
	fits := func(wanted bool, spare int) bool {
		if !wanted || f.rows <= fewestRows+spare {
			return false
		}
		f.rows--
		return true
	}
	selects := s.settings.State != "" || s.settings.Driver != "" || s.settings.Handler != ""
	f.filter = fits(selects || s.list.filter.typed != nil || s.list.filter.text != "", -1)
	f.alert = fits(s.old() || len(s.node.daemon.problems) > 0, 0)
	f.heading = fits(true, 0)
	f.title = fits(true, 0)
	f.hints = fits(true, 1)
	f.message = fits(true, 2)
	f.totals = fits(true, 2)
	f.sum = fits(true, 4)
	f.blank = fits(true, 8)
	return f
}
