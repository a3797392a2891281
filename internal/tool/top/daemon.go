package top

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"sync"
	"time"

	tea "charm.land/bubbletea/v2"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/internal/tool/printer"
	"github.com/crust-proxy/crust-proxy/internal/tool/show"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// The pause before the watch is tried again doubles up to a bound.
const (
	firstRetry = 250 * time.Millisecond
	lastRetry  = 5 * time.Second
)

// Changes from the watch are gathered for a moment, so that a busy node is drawn a few
// times a second and not for each change.
const (
	gatherFor  = 100 * time.Millisecond
	gatherMost = 1000
)

func (d Daemon) fetchStats(ctx context.Context, id string) StatsFetched {
	ctx, cancel := context.WithTimeout(ctx, d.Timeout)
	defer cancel()
	start := time.Now()
	reply, err := d.GetVolumeStats(ctx, &adminv1.GetVolumeStatsRequest{Volume: id})
	answer := StatsFetched{ID: id, At: time.Now(), Took: time.Since(start), Reply: reply}
	if err != nil {
		answer.Reply, answer.Failure = nil, status.Convert(err).Message() // as the daemon records it
		answer.Unanswered = ctx.Err() != nil
		return answer
	}
	if took := reply.GetTook(); took != nil {
		answer.Took = took.AsDuration() // without the call to the daemon
	}
	return answer
}

// poll asks the daemon for what the watch does not report. A part that fails is left out,
// because an older daemon lacks some calls. The error is that of listing the volumes.
func (d Daemon) poll(ctx context.Context, settings Settings, eventsOf string) (e Polled, err error) {
	ctx, cancel := context.WithTimeout(ctx, d.Timeout)
	defer cancel()
	e.Volumes, err = ListVolumes(ctx, d, &adminv1.ListVolumesRequest{Driver: settings.Driver, Handler: settings.Handler})
	e.Node, _ = d.GetNode(ctx, &adminv1.GetNodeRequest{})
	handlers, _ := d.ListHandlers(ctx, &adminv1.ListHandlersRequest{})
	e.Handlers = handlers.GetHandlers()
	e.Drivers, _ = d.ListDrivers(ctx, &adminv1.ListDriversRequest{})
	if eventsOf != "" {
		events, _ := d.ListEvents(ctx, &adminv1.ListEventsRequest{Volume: eventsOf, Limit: shownEvents})
		e.Events, e.EventsOf = events.GetEvents(), eventsOf
	}
	e.At = time.Now()
	return e, err
}

// ListVolumes gathers all pages.
func ListVolumes(ctx context.Context, c adminv1.AdminClient, req *adminv1.ListVolumesRequest) ([]*adminv1.Volume, error) {
	var all []*adminv1.Volume
	req.PageSize = 1000
	for {
		page, err := c.ListVolumes(ctx, req)
		if err != nil {
			return nil, err
		}
		all = append(all, page.GetVolumes()...)
		if req.PageToken = page.GetNextPageToken(); req.GetPageToken() == "" {
			return all, nil
		}
	}
}

// watch follows the volumes until ctx ends, through restarts of the daemon.
func (d Daemon) watch(ctx context.Context, settings Settings, send func(Event)) {
	wait := firstRetry
	for {
		synced, err := d.watchOnce(ctx, settings, send)
		if ctx.Err() != nil {
			return
		}
		if synced {
			wait = firstRetry
		}
		reason := show.Either(errors.Is(err, io.EOF), "the daemon ended the watch", d.Explain(err))
		// Random, so that not all watchers of a node retry at the same moment.
		pause := wait/2 + rand.N(wait) //nolint:gosec // no secret
		send(Disconnected{At: time.Now(), Retry: time.Now().Add(pause), Reason: reason})
		if !sys.Sleep(ctx, pause) {
			return
		}
		wait = min(2*wait, lastRetry)
	}
}

// watchOnce follows one watch to its end. synced reports whether its listing was complete.
func (d Daemon) watchOnce(ctx context.Context, settings Settings, send func(Event)) (synced bool, err error) {
	stream, err := d.WatchVolumes(ctx, &adminv1.WatchVolumesRequest{Driver: settings.Driver, Handler: settings.Handler})
	if err != nil {
		return false, err
	}
	changes := make(chan *adminv1.WatchVolumesResponse)
	go func() {
		defer close(changes)
		for {
			var change *adminv1.WatchVolumesResponse
			if change, err = stream.Recv(); err != nil {
				return
			}
			changes <- change // all of them are read below, until this is closed
		}
	}()
	for first := range changes {
		batch := gather(first, changes)
		synced = synced || endsListing(batch)
		send(Watched{Changes: batch})
	}
	return synced, err
}

// endsListing reports whether a batch completes the listing; gather ends the batch there.
func endsListing(batch []*adminv1.WatchVolumesResponse) bool {
	return batch[len(batch)-1].GetType() == adminv1.WatchVolumesResponse_TYPE_SYNCED
}

// gather collects the changes that follow a first one closely.
func gather(first *adminv1.WatchVolumesResponse, changes <-chan *adminv1.WatchVolumesResponse) []*adminv1.WatchVolumesResponse {
	batch := []*adminv1.WatchVolumesResponse{first}
	over := time.After(gatherFor)
	for len(batch) < gatherMost && !endsListing(batch) { // the first screen need not wait
		select {
		case change, more := <-changes:
			if !more {
				return batch
			}
			batch = append(batch, change)
		case <-over:
			return batch
		}
	}
	return batch
}

// Daemon makes the calls to the daemon.
type Daemon struct {
	adminv1.AdminClient
	// Explain turns an error of a call into one line of text.
	Explain func(error) string
	Timeout time.Duration
}

// Terminal is where the volumes are shown.
type Terminal struct {
	In  *os.File
	Out io.Writer
	// Env is the environment; it may forbid colours.
	Env []string
}

const (
	tick   = 500 * time.Millisecond
	frames = 20 // a second, at most
)

// Run shows the volumes until the user or ctx ends it.
func Run(ctx context.Context, d Daemon, t Terminal, settings Settings) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	exists := func() bool { return printer.IsTerminal(t.In) }
	m := &model{state: New(settings, time.Now()), ctx: ctx, daemon: d, exists: exists}
	program := tea.NewProgram(m,
		tea.WithInput(t.In), tea.WithOutput(t.Out), tea.WithEnvironment(t.Env), tea.WithFPS(frames), tea.WithoutSignalHandler())
	defer context.AfterFunc(ctx, program.Quit)()
	var group sync.WaitGroup
	group.Go(func() { d.watch(ctx, settings, program.Send) })
	_, err := program.Run()
	cancel()
	group.Wait()
	if errors.Is(err, tea.ErrProgramKilled) && !exists() {
		return nil // the terminal is gone: nobody can read the error
	}
	return err
}

type model struct {
	state  *State
	ctx    context.Context // ends with Run
	daemon Daemon
	exists func() bool
}

// Init starts the clock.
func (*model) Init() tea.Cmd {
	return tea.Tick(tick, func(now time.Time) tea.Msg { return Clock{Now: now} })
}

// Update turns a message into an event, and effects into commands.
func (m *model) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	var commands []tea.Cmd
	switch event := msg.(type) {
	case tea.KeyPressMsg:
		msg = Key{Name: event.String(), Text: event.Key().Text}
	case tea.PasteMsg:
		msg = Key{Name: "paste", Text: event.Content}
	case Clock:
		if !m.exists() {
			return m, tea.Quit
		}
		commands = append(commands, m.Init())
	}
	return m, tea.Batch(append(commands, sys.Map(m.state.Apply(msg), m.command)...)...)
}

func (m *model) command(effect Effect) tea.Cmd {
	switch effect := effect.(type) {
	case FetchStats:
		return func() tea.Msg { return m.daemon.fetchStats(m.ctx, effect.ID) }
	case Poll:
		return func() tea.Msg {
			// The watch reports when the daemon is away, but not when it hangs.
			polled, err := m.daemon.poll(m.ctx, m.state.settings, effect.EventsOf)
			polled.Unanswered = status.Code(err) == codes.DeadlineExceeded
			return polled
		}
	}
	return func() tea.Msg { return effect }
}

// View draws on the alternate screen, so that the shell's is restored at the end.
func (m *model) View() tea.View {
	v := tea.NewView(m.state.View())
	v.AltScreen = true
	return v
}
