package top

import (
	"context"
	"strings"
	"sync"
	"time"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// Picture is the node at one moment, for an output that is not a terminal.
type Picture struct {
	Node     *adminv1.GetNodeResponse
	Handlers []*adminv1.Handler
	Drivers  *adminv1.ListDriversResponse
	// Volumes are those that the settings select, in their order, with fresh numbers
	// where a sandbox answered in time.
	Volumes []*adminv1.Volume

	state *State
}

// unbounded is the width and height of a screen that has room for everything.
const unbounded = 1 << 20

// Once returns the current picture. It waits one interval for the sandboxes; for those
// that have not answered by then, it has the last known numbers.
func Once(ctx context.Context, d Daemon, settings Settings) (*Picture, error) {
	settings.Plain = true
	s := New(settings, time.Now())
	volumes, err := ListVolumes(ctx, d, settings.request())
	if err != nil {
		return nil, err
	}
	s.Apply(Size{Width: unbounded, Height: unbounded})
	effects := s.Apply(Watched{Changes: listed(volumes)})
	polled := d.poll(ctx, settings, true)
	if polled.Node == nil {
		polled.Node = &adminv1.GetNodeResponse{} // the rest is worth showing
	}
	effects = append(effects, s.Apply(polled)...)
	fetchAll(ctx, d, s, effects)
	s.now = time.Now()
	p := &Picture{Node: polled.Node, Handlers: polled.Handlers, Drivers: polled.Drivers, state: s}
	for _, r := range s.list.rows {
		p.Volumes = append(p.Volumes, r.v)
	}
	return p, nil
}

func listed(volumes []*adminv1.Volume) []*adminv1.WatchVolumesResponse {
	changes := make([]*adminv1.WatchVolumesResponse, 0, len(volumes)+1)
	for _, v := range volumes {
		changes = append(changes, &adminv1.WatchVolumesResponse{Type: adminv1.WatchVolumesResponse_TYPE_CHANGED, Volume: v})
	}
	return append(changes, &adminv1.WatchVolumesResponse{Type: adminv1.WatchVolumesResponse_TYPE_SYNCED})
}

// fetchAll asks sandboxes until all were asked or one interval is over.
func fetchAll(ctx context.Context, d Daemon, s *State, effects []Effect) {
	ctx, cancel := context.WithTimeout(ctx, s.settings.Interval)
	defer cancel()
	var group sync.WaitGroup
	defer group.Wait()
	answers := make(chan StatsFetched)
	for pending := 0; ; pending-- {
		for _, effect := range effects {
			if fetch, ok := effect.(FetchStats); ok {
				pending++
				group.Go(func() {
					select {
					case answers <- d.fetchStats(ctx, fetch.ID):
					case <-ctx.Done():
					}
				})
			}
		}
		if pending == 0 {
			return
		}
		select {
		case answer := <-answers:
			if ctx.Err() != nil {
				return // the failure is ours
			}
			effects = s.Apply(answer)
		case <-ctx.Done():
			return
		}
	}
}

// Text is the picture as lines of text, each as long as it needs.
func (p *Picture) Text() string {
	s := p.state
	s.canvas.width = unbounded
	v := newListView(s)
	v.table.unbounded()
	lines := []string{v.canvas.line("", v.title()...), v.canvas.line("", append(v.totals(), "  ", v.health())...), v.sumLine()}
	for _, problem := range s.node.daemon.problems {
		lines = append(lines, "! "+problem)
	}
	lines = append(lines, "")
	if len(s.list.rows) == 0 {
		lines = append(lines, v.emptyText())
	} else {
		lines = append(lines, v.table.heading())
	}
	for _, r := range s.list.rows {
		lines = append(lines, v.table.row(r, false))
	}
	return strings.Join(lines, "\n") + "\n"
}
