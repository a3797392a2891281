package top

import (
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/crust-proxy/crust-proxy/internal/tool/show"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

const labelWidth = 13

type sheet struct {
	s      *State
	canvas canvas
	row    *row // nil once the volume is gone
	lines  []string
}

func newSheet(s *State) *sheet {
	return &sheet{s: s, canvas: s.canvas, row: s.shown()[s.detail.id]}
}

func (p *sheet) page() []string {
	lines := []string{p.title()}
	if p.alerts() {
		lines = append(lines, alertLine(p.s))
	}
	all := p.content()
	from := min(p.s.detail.top, len(all))
	lines = append(lines, all[from:min(len(all), from+p.height())]...)
	for len(lines) < p.canvas.height-1 {
		lines = append(lines, "")
	}
	return append(lines, hintLine(p.s, detailActions))
}

func (p *sheet) alerts() bool { return p.s.old() && p.canvas.height > 6 }

func (p *sheet) height() int {
	rows := p.canvas.height - 2
	if p.alerts() {
		rows--
	}
	return max(1, rows)
}

func (p *sheet) title() string {
	r, paint := p.row, p.canvas.paint
	if r == nil {
		return p.canvas.line(freshness(p.s), paint(show.Bold, show.ShortID(p.canvas.escape(p.s.detail.id))), paint(show.Alarm, "  GONE"))
	}
	of := paint(show.Faint, show.When(r.pod != "", "  of "))
	return p.canvas.line(freshness(p.s), paint(show.Bold, r.name), "  ", paint(stateColour(r), r.state), of, r.pod)
}

// content is all that is known of the volume, also what the screen has no room for.
func (p *sheet) content() []string {
	p.lines = []string{""}
	if p.row == nil {
		p.text("", show.Plain, "This volume has gone: it was unpublished, or its refusal is forgotten.")
	} else {
		p.numbers()
		p.errors()
		p.lines = append(p.lines, "")
		p.facts()
	}
	p.events()
	return p.lines
}

func (p *sheet) line(label string, texts ...string) {
	label = p.canvas.paint(show.Faint, p.canvas.fit(label, labelWidth, false))
	p.lines = append(p.lines, p.canvas.line("", append([]string{label}, texts...)...))
}

// text adds a text with a label on as many lines as it needs, which may be none.
func (p *sheet) text(label, code, text string) {
	if text == "" {
		return
	}
	for _, part := range wrap(p.canvas.escape(text), p.canvas.width-labelWidth) {
		p.line(label, p.canvas.paint(code, part))
		label = ""
	}
}

func (p *sheet) numbers() {
	r := p.row
	p.usage("Bytes", r.bytes, show.Size)
	p.usage("Inodes", r.inodes, func(n int64) string { return fmt.Sprint(n) })
	switch v := r.v; {
	case v.GetUsageAt() != nil:
		p.text("Learned", show.Plain, p.ago(v.GetUsageAt()))
	case !r.hasSandbox():
		p.text("Usage", show.Faint, "not known: no sandbox has the volume that could be asked")
	default:
		p.text("Usage", show.Faint, "not known yet")
	}
	if r.asked {
		failed := r.v.GetStatsFailures()
		requests := ", " + count(int(r.v.GetStatsRequests()), "request") + show.When(failed > 0, fmt.Sprintf(", %d failed", failed))
		p.line("Stats", p.canvas.paint(latencyColour(r), p.canvas.latency(r)), requests+"  ", p.spark(p.canvas.width-labelWidth-32))
	}
	if since := p.s.schedule.fetching[r.id()].since; !since.IsZero() && p.s.now.Sub(since) >= slow {
		p.line("", p.canvas.paint(show.Yellow, "asked "+age(p.s.now, since)+" ago, no answer yet"))
	}
	if c := r.v.GetCondition(); c != nil {
		word := show.Either(c.GetAbnormal(), "abnormal", "normal")
		p.text("Condition", show.Either(c.GetAbnormal(), show.Red, show.Green), show.Joined(": ", word, c.GetMessage()))
	}
}

func (p *sheet) usage(label string, u *adminv1.VolumeUsage, words func(int64) string) {
	if u == nil {
		return
	}
	bar := p.canvas.bar(u, max(6, min(40, p.canvas.width-labelWidth-44)))
	used := fmt.Sprintf(" %4s  %s of %s", percent(u), words(u.GetUsed()), words(u.GetTotal()))
	p.line(label, bar, used, p.canvas.paint(show.Faint, ", "+words(u.GetAvailable())+" free"))
}

// errors adds what went wrong since crustctl top runs, the newest first.
func (p *sheet) errors() {
	current, errors := p.row.err != "", p.row.history.errors
	if current || len(errors) > 0 {
		p.lines = append(p.lines, "")
	}
	if !current && len(errors) > 0 {
		p.text("Errors", show.Green, "none now; before:")
	}
	label := "Error"
	for i, e := range errors {
		p.text(label, show.Either(i == 0 && current, show.Red, show.Faint), p.when(e)+e.text)
		label = ""
	}
}

const shownEvents = 20

func (p *sheet) events() {
	label := "Events"
	for _, e := range p.s.detail.events {
		when := p.when(pastError{last: timeOf(e.GetLastAt()), times: int(e.GetCount())})
		p.text(label, show.When(e.GetFailed(), show.Red), when+show.Joined(": ", e.GetWhat()+" by "+e.GetBy(), e.GetText()))
		label = ""
	}
}

func (p *sheet) when(e pastError) string {
	layout := show.Either(p.s.now.Sub(e.last) > 24*time.Hour, time.DateTime, time.TimeOnly)
	return fmt.Sprintf("%s (%s ago)", e.last.Local().Format(layout), age(p.s.now, e.last)) + show.When(e.times > 1, fmt.Sprintf(", %d times", e.times)) + ": "
}

func (p *sheet) facts() {
	v := p.row.v
	p.text("Refused by", show.Red, v.GetRefusedBy())
	p.text("Refusals", show.Plain, show.When(v.GetRefusals() > 0, fmt.Sprint(v.GetRefusals())))
	p.text("Target", show.Plain, v.GetTargetPath())
	p.text("ID", show.Plain, v.GetId())
	p.text("Pod", show.Plain, show.WithDetail(show.ShortPod(v), v.GetPodUid()))
	p.text("Driver", show.Plain, v.GetDriver())
	p.text("CSI volume", show.Plain, v.GetVolumeId())
	p.text("Way", show.Plain, v.GetWay())
	p.text("Rule", show.Plain, v.GetRule())
	p.text("Handler", show.Plain, v.GetHandler())
	if p.row.hasSandbox() {
		p.text("Sandbox", show.Plain, show.WithDetail(v.GetSandbox().GetId(), v.GetSandbox().GetRuntime()))
		p.text("Known", show.Plain, p.ago(v.GetSandbox().GetBoundAt()))
	}
	p.text("Device", show.Plain, show.WithDetail(v.GetDevice(), v.GetDeviceId()))
	p.text("Filesystem", show.Plain, v.GetFsType())
	p.text("Access", show.Plain, show.WithDetail(access(v.GetReadOnly()), v.GetAccessMode()))
	p.text("Mount flags", show.Plain, strings.Join(v.GetMountFlags(), ","))
	p.text("Group", show.Plain, show.WithDetail(v.GetSupplementalGroup(), v.GetSupplementalGroupChangePolicy()))
	p.text("Grow to", show.Plain, show.When(v.GetGrowToBytes() > 0, show.Size(v.GetGrowToBytes())))
	p.text("Created", show.Plain, p.ago(v.GetCreatedAt()))
}

func access(readOnly bool) string { return show.Either(readOnly, "read-only", "read-write") }

// ago is how long ago a time was, and the time; empty for an unknown time.
func (p *sheet) ago(t *timestamppb.Timestamp) string {
	at := timeOf(t)
	return show.When(!at.IsZero(), age(p.s.now, at)+" ago, at "+at.Local().Format(time.DateTime))
}

// spark draws the times of the last answers in relation to the longest.
func (p *sheet) spark(width int) string {
	samples := p.row.history.took
	samples = samples[max(0, len(samples)-max(0, width)):]
	if len(samples) < 2 {
		return ""
	}
	longest := time.Duration(1)
	for _, one := range samples {
		longest = max(longest, one.took)
	}
	levels := p.canvas.spark
	var b strings.Builder
	for _, one := range samples {
		if one.failed {
			b.WriteByte('x')
			continue
		}
		b.WriteRune(levels[int(int64(one.took)*int64(len(levels)-1)/int64(longest))])
	}
	return p.canvas.paint(show.Cyan, b.String())
}
