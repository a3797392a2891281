package top

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// Picture is one look at the node, for who is no terminal.
type Picture struct {
	Node     *adminv1.GetNodeResponse
	Handlers []*adminv1.Handler
	Drivers  *adminv1.ListDriversResponse
	// Volumes are those that fit the settings, in their order, with fresh numbers
	// where a sandbox gave them in time.
	Volumes []*adminv1.Volume

	state *State
}

// unbounded is the width and height of a screen that has room for all.
const unbounded = 1 << 20

// Once looks once. Sandboxes are asked for the time of one interval; of those that
// have not answered then, the last known numbers are shown.
func Once(ctx context.Context, d Daemon, settings Settings) (*Picture, error) {
	settings.Plain = true
	s := New(settings, time.Now())
	volumes, err := d.volumes(ctx, settings)
	if err != nil {
		return nil, err
	}
	s.Apply(Size{Width: unbounded, Height: unbounded})
	questions := s.Apply(Watched{Changes: listed(volumes)})
	looked := d.look(ctx, settings, true)
	if looked.Node == nil {
		looked.Node = &adminv1.GetNodeResponse{} // what there is of the picture is shown all the same
	}
	questions = append(questions, s.Apply(looked)...)
	answerAll(ctx, d, s, questions)
	s.now = time.Now()
	p := &Picture{Node: looked.Node, Handlers: looked.Handlers, Drivers: looked.Drivers, state: s}
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

// answerAll has sandboxes asked until all were, or the time is over.
func answerAll(ctx context.Context, d Daemon, s *State, questions []Effect) {
	ctx, cancel := context.WithTimeout(ctx, s.settings.Interval)
	defer cancel()
	var group sync.WaitGroup
	defer group.Wait()
	answers := make(chan Answered)
	under := 0
	ask := func(effects []Effect) {
		for _, effect := range effects {
			question, ok := effect.(Ask)
			if !ok {
				continue // what else is wanted was asked already
			}
			under++
			group.Go(func() {
				select {
				case answers <- d.ask(ctx, question.ID):
				case <-ctx.Done():
				}
			})
		}
	}
	ask(questions)
	for under > 0 {
		select {
		case answer := <-answers:
			under--
			if ctx.Err() == nil {
				ask(s.Apply(answer))
			}
		case <-ctx.Done():
			return
		}
	}
}

// Text is the picture as lines of text, each as long as it needs.
func (p *Picture) Text() string {
	s := p.state
	var b strings.Builder
	s.width = 200 // of the lines above the table
	fmt.Fprintln(&b, s.titleText())
	fmt.Fprintln(&b, s.totalsText())
	fmt.Fprintln(&b, s.sumLine())
	for _, problem := range s.node.problems {
		fmt.Fprintln(&b, "! "+problem)
	}
	fmt.Fprintln(&b)
	if len(s.list.rows) == 0 {
		fmt.Fprintln(&b, s.emptyText())
		return b.String()
	}
	widths := s.plainWidths()
	s.width = unbounded
	fmt.Fprintln(&b, s.heading(widths))
	for _, r := range s.list.rows {
		fmt.Fprintln(&b, s.row(r, widths, false))
	}
	return b.String()
}

func (s *State) titleText() string {
	up := ""
	if !s.node.started.IsZero() {
		up = "up " + s.age(s.node.started)
	}
	return joined("  ", joined(" ", "crust-proxy", s.node.version), s.node.name, up)
}

func (s *State) totalsText() string {
	names, counts := s.byState()
	text := fmt.Sprintf("Volumes %d", len(s.volumes))
	for _, name := range names {
		text += fmt.Sprintf("  %d %s", counts[name], strings.ToLower(name))
	}
	parts := ""
	for _, part := range s.parts() {
		parts += part.text
	}
	return joined("  ", text, parts)
}

// plainWidths are those of all columns that have something to show, as wide as
// that is.
func (s *State) plainWidths() (widths [columnCount]int) {
	for c, column := range columns {
		switch {
		case column.text == nil:
			widths[c] = column.least
		case s.list.natural[c] > 0:
			widths[c] = max(s.list.natural[c], cells(column.title)+1)
		}
	}
	widths[colUsage] = 16
	return widths
}
