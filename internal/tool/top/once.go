package top

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// Picture is the node at one moment, for an output that is not a terminal. Its volumes are those that the settings
// select, in their order, with fresh numbers where a sandbox answered in time.
type Picture struct {
	Polled
	state *State
}

// unbounded is the width and height of a screen that has room for everything.
const unbounded = 1 << 20

// Once returns the current picture. It waits one interval for the sandboxes; for those
// that have not answered by then, it has the last known numbers.
func Once(ctx context.Context, d Daemon, settings Settings) (*Picture, error) {
	settings.Plain = true
	s := New(settings, time.Now())
	polled, err := d.poll(ctx, settings, "")
	if err != nil {
		return nil, err
	}
	polled.Node = cmp.Or(polled.Node, &adminv1.GetNodeResponse{}) // the rest is worth showing
	s.Apply(Size{Width: unbounded, Height: unbounded})
	for _, v := range polled.Volumes {
		s.node.put(v, s.now)
	}
	s.node.synced(s.now)
	s.Apply(polled)
	fetchAll(ctx, d, s)
	s.now, polled.Volumes = time.Now(), sys.Map(s.list.rows, func(r *row) *adminv1.Volume { return r.v })
	return &Picture{Polled: polled, state: s}, nil
}

// fetchAll asks all sandboxes, until one interval is over.
func fetchAll(ctx context.Context, d Daemon, s *State) {
	ctx, cancel := context.WithTimeout(ctx, s.settings.Interval)
	defer cancel()
	rows := slices.DeleteFunc(slices.Clone(s.list.rows), func(r *row) bool { return !r.hasSandbox() })
	answers := make([]StatsFetched, len(rows))
	sys.Each(s.schedule.limit, slices.All(rows), func(i int, r *row) {
		if answer := d.fetchStats(ctx, r.id()); ctx.Err() == nil { // else the failure is ours
			answers[i] = answer
		}
	})
	for _, answer := range answers {
		if answer.ID != "" {
			s.fetched(answer)
		}
	}
	s.Apply(Clock{Now: s.now}) // once: it sorts all volumes
}

// Text is the picture as lines of text: of at most that width, with the errors below
// their volumes, or, with 0, each as long as it needs.
func (p *Picture) Text(width int) string {
	s := p.state
	s.canvas.width = cmp.Or(width, unbounded)
	t := newTable(s)
	if width == 0 {
		t.unbounded()
	} else {
		t.natural[colError] = 0
		t.layout()
	}
	counts := append(t.totals(), "  ", t.health())
	lines := []string{s.canvas.line("", t.title()...), s.canvas.line("", counts...), t.sumLine()}
	for _, problem := range s.node.daemon.problems {
		lines = append(lines, s.canvas.hanging("! ", problem)...)
	}
	lines = append(lines, "")
	if len(s.list.rows) == 0 {
		lines = append(lines, t.emptyText())
	} else {
		lines = append(lines, t.heading())
	}
	for _, r := range s.list.rows {
		lines = append(lines, t.row(r, false))
		if width > 0 && r.err != "" {
			lines = append(lines, s.canvas.hanging(strings.Repeat(" ", 2*gutter), r.err)...)
		}
	}
	return strings.Join(lines, "\n") + "\n"
}
