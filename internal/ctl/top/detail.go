package top

import (
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/crust-proxy/crust-proxy/internal/ctl/show"
)

const labelWidth = 13

var detailHints = []hint{{"q", "quit"}, {"esc", "back"}, {"r", "ask now"}, {"p", "pause"}, {"↑↓", "scroll"}, {"?", "help"}}

func (s *State) detailPage() []string {
	lines := []string{s.detailTitle()}
	if s.alarmedDetail() {
		lines = append(lines, s.alertLine())
	}
	all := s.detailLines()
	from := min(s.detail.top, len(all))
	lines = append(lines, all[from:min(len(all), from+s.detailRows())]...)
	for len(lines) < s.height-1 {
		lines = append(lines, "")
	}
	hints := detailHints
	if s.settings.ASCII {
		hints = append([]hint(nil), detailHints...)
		hints[4].key = "up/down"
	}
	return append(lines, s.hintLine(hints))
}

func (s *State) alarmedDetail() bool { return s.link.away && s.height > 6 }

// detailRows is how many lines of a volume the screen holds.
func (s *State) detailRows() int {
	rows := s.height - 2
	if s.alarmedDetail() {
		rows--
	}
	return max(1, rows)
}

func (s *State) detailTitle() string {
	r := s.picture()[s.detail.id]
	if r == nil {
		return s.line([]span{{bold, short(s.clean(s.detail.id), shortID)}, {alarm, "  GONE"}}, s.pace())
	}
	left := []span{{bold, r.name}, {plain, "  "}, {show.StateColour(r.v.GetState()), r.state}}
	if r.pod != "" {
		left = append(left, span{faint, "  of "}, span{plain, r.pod})
	}
	return s.line(left, s.pace())
}

// page collects the lines of a volume.
type sheet struct {
	s     *State
	lines []string
}

func (p *sheet) blank() { p.lines = append(p.lines, "") }

// spans adds a line of pieces beside a label.
func (p *sheet) spans(label string, spans ...span) {
	p.lines = append(p.lines, p.s.line(append([]span{{faint, p.s.fit(label, labelWidth, false)}}, spans...), nil))
}

// text adds a text beside a label, on as many lines as it needs; an empty one is
// left out.
func (p *sheet) text(label, code, text string) {
	if text == "" {
		return
	}
	for _, part := range wrap(p.s.clean(text), p.s.width-labelWidth) {
		p.spans(label, span{code, part})
		label = ""
	}
}

func (s *State) detailLines() []string {
	p := &sheet{s: s}
	r := s.picture()[s.detail.id]
	if r == nil {
		p.blank()
		p.text("", plain, "This volume has gone: it was unpublished, or its refusal is forgotten.")
		return p.lines
	}
	p.blank()
	p.numbers(r)
	p.errors(r)
	p.blank()
	p.facts(r)
	return p.lines
}

// numbers are usage and what the sandbox needed to tell it.
func (p *sheet) numbers(r *row) {
	p.measure("Bytes", r.bytes, show.Size)
	p.measure("Inodes", r.inodes, func(n int64) string { return fmt.Sprint(n) })
	switch v := r.v; {
	case v.GetUsageAt() != nil:
		p.text("Learned", plain, p.ago(v.GetUsageAt()))
	case v.GetSandbox().GetId() == "":
		p.text("Usage", faint, "not known: no sandbox has the volume that could be asked")
	default:
		p.text("Usage", faint, "not known yet")
	}
	if r.asked {
		p.spans("Stats", span{latencyCode(r), p.s.latency(r)}, span{plain, p.requests(r) + "  "}, p.s.spark(r.id(), p.s.width-labelWidth-32))
	}
	if a := p.s.asks[r.id()]; a != nil && a.under && p.s.now.Sub(a.since) >= slow {
		p.spans("", span{yellow, "asked " + p.s.age(a.since) + " ago, no answer yet"})
	}
	if c := r.v.GetCondition(); c != nil {
		code, word := green, "normal"
		if c.GetAbnormal() {
			code, word = red, "abnormal"
		}
		p.text("Condition", code, strings.TrimSuffix(word+": "+c.GetMessage(), ": "))
	}
}

func (p *sheet) requests(r *row) string {
	text := fmt.Sprintf(", %s", count(int(r.v.GetStatsRequests()), "request"))
	if failed := r.v.GetStatsFailures(); failed > 0 {
		text += fmt.Sprintf(", %d failed", failed)
	}
	return text
}

func (p *sheet) measure(label string, m measure, words func(int64) string) {
	if !m.known {
		return
	}
	spans := append(p.s.bar(m, max(6, min(40, p.s.width-labelWidth-44))), span{plain, fmt.Sprintf(" %4s  ", percent(m))},
		span{plain, words(m.used) + " of " + words(m.total)}, span{faint, ", " + words(m.free) + " free"})
	p.spans(label, spans...)
}

// errors are what went wrong, the newest first: now, or since top looks.
func (p *sheet) errors(r *row) {
	if r.err != "" || len(p.s.seen(r.id()).errors) > 0 {
		p.blank()
	}
	if r.err == "" && len(p.s.seen(r.id()).errors) > 0 {
		p.text("Errors", green, "none now; before:")
	}
	label := "Error"
	for i, e := range p.s.seen(r.id()).errors {
		code := faint
		if i == 0 && r.err != "" {
			code = red
		}
		p.text(label, code, p.when(e)+e.text)
		label = ""
	}
}

func (p *sheet) when(e pastError) string {
	text := e.last.Local().Format(time.TimeOnly)
	if p.s.now.Sub(e.last) > 24*time.Hour {
		text = e.last.Local().Format(time.DateTime)
	}
	text += " (" + p.s.age(e.last) + " ago)"
	if e.times > 1 {
		text += fmt.Sprintf(", %d times", e.times)
	}
	return text + ": "
}

// facts are what is on record.
func (p *sheet) facts(r *row) {
	v := r.v
	p.text("Refused by", red, v.GetRefusedBy())
	if n := v.GetRefusals(); n > 0 {
		p.text("Refusals", plain, fmt.Sprint(n))
	}
	p.text("Target", plain, v.GetTargetPath())
	p.text("ID", plain, v.GetId())
	p.text("Pod", plain, joined(" ", podOf(v), bracket(v.GetPodUid())))
	p.text("Driver", plain, v.GetDriver())
	p.text("CSI volume", plain, v.GetVolumeId())
	p.text("Way", plain, v.GetWay())
	p.text("Rule", plain, v.GetRule())
	p.text("Handler", plain, v.GetHandler())
	if box := v.GetSandbox(); box.GetId() != "" {
		p.text("Sandbox", plain, joined(" ", box.GetId(), bracket(box.GetRuntime())))
		p.text("Bound", plain, p.ago(box.GetBoundAt()))
	}
	p.text("Device", plain, joined(" ", v.GetDevice(), bracket(v.GetDeviceId())))
	p.text("Filesystem", plain, v.GetFsType())
	p.text("Access", plain, joined(" ", access(v.GetReadOnly()), bracket(v.GetAccessMode())))
	p.text("Mount flags", plain, strings.Join(v.GetMountFlags(), ","))
	p.text("Group", plain, joined(" ", v.GetSupplementalGroup(), bracket(v.GetSupplementalGroupChangePolicy())))
	if v.GetGrowToBytes() > 0 {
		p.text("Grow to", plain, show.Size(v.GetGrowToBytes()))
	}
	p.text("Created", plain, p.ago(v.GetCreatedAt()))
}

func access(readOnly bool) string {
	if readOnly {
		return "read-only"
	}
	return "read-write"
}

func bracket(text string) string {
	if text == "" {
		return ""
	}
	return "(" + text + ")"
}

// joined joins what is not empty.
func joined(by string, parts ...string) string {
	var some []string
	for _, part := range parts {
		if part != "" {
			some = append(some, part)
		}
	}
	return strings.Join(some, by)
}

// ago is a time and how long it is ago.
func (p *sheet) ago(t *timestamppb.Timestamp) string {
	at := timeOf(t)
	if at.IsZero() {
		return ""
	}
	return p.s.age(at) + " ago, at " + at.Local().Format(time.DateTime)
}

// spark draws how long the last answers took, each against the longest.
func (s *State) spark(id string, width int) span {
	levels := []rune("▁▂▃▄▅▆▇█")
	if s.settings.ASCII {
		levels = []rune(".:-=+*#@")
	}
	samples := s.seen(id).took
	samples = samples[max(0, len(samples)-max(0, width)):]
	if len(samples) < 2 {
		return span{}
	}
	longest := time.Duration(1)
	for _, one := range samples {
		longest = max(longest, one.took)
	}
	var b strings.Builder
	for _, one := range samples {
		if one.failed {
			b.WriteByte('x')
			continue
		}
		b.WriteRune(levels[int(int64(one.took)*int64(len(levels)-1)/int64(longest))])
	}
	return span{cyan, b.String()}
}
