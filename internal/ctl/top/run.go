package top

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	tea "charm.land/bubbletea/v2"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// Daemon is how the daemon is asked.
type Daemon struct {
	adminv1.AdminClient
	// Explain puts an error of a call into one line of words.
	Explain func(error) string
	// Timeout bounds a call; 0 is no bound.
	Timeout time.Duration
}

// Terminal is where the picture is shown.
type Terminal struct {
	In  io.Reader
	Out io.Writer
	// Env is the environment, in which colours may be forbidden.
	Env []string
	// There tells whether the terminal still is; it may be nil.
	There func() bool
}

const (
	tick = 500 * time.Millisecond
	// frames bounds how often a second the picture is drawn.
	frames = 20
)

// Run shows the volumes until the user or ctx ends it.
func Run(ctx context.Context, d Daemon, t Terminal, settings Settings) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	w := &worker{ctx: ctx, daemon: d, settings: settings}
	program := tea.NewProgram(&screen{state: New(settings, time.Now()), worker: w},
		tea.WithInput(t.In), tea.WithOutput(t.Out), tea.WithEnvironment(t.Env), tea.WithFPS(frames), tea.WithoutSignalHandler())
	w.tell = func(e Event) { program.Send(e) }
	w.group.Go(func() { d.watch(ctx, settings, w.tell) })
	w.group.Go(func() { clock(ctx, t.There, w.tell, program.Quit) })
	_, err := program.Run()
	cancel()
	w.group.Wait()
	if errors.Is(err, tea.ErrProgramKilled) && t.There != nil && !t.There() {
		return nil // the terminal has gone: there is nobody to tell
	}
	return err
}

// clock tells the time until ctx ends or the terminal has gone, and then has the
// program end.
func clock(ctx context.Context, there func() bool, tell func(Event), quit func()) {
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			quit()
			return
		case now := <-ticker.C:
			if there != nil && !there() {
				quit()
				return
			}
			tell(Clock{Now: now})
		}
	}
}

// screen is the State as bubbletea wants it.
type screen struct {
	state  *State
	worker *worker
}

// Init starts nothing: what comes from outside is sent.
func (*screen) Init() tea.Cmd { return nil }

// Update turns a message into an event, and effects into work.
func (m *screen) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	var event Event
	switch msg := msg.(type) {
	case Event:
		event = msg
	case tea.KeyPressMsg:
		event = Key{Name: msg.String(), Text: msg.Key().Text}
	case tea.PasteMsg:
		event = Key{Name: "paste", Text: msg.Content}
	case tea.WindowSizeMsg:
		event = Size{Width: msg.Width, Height: msg.Height}
	default:
		return m, nil
	}
	var cmd tea.Cmd
	for _, effect := range m.state.Apply(event) {
		switch effect := effect.(type) {
		case Quit:
			cmd = tea.Quit
		case Suspend:
			cmd = tea.Suspend
		default:
			m.worker.do(effect)
		}
	}
	return m, cmd
}

// View draws on a screen of its own, so that the shell's is as it was afterwards.
func (m *screen) View() tea.View {
	v := tea.NewView(m.state.View())
	v.AltScreen = true
	return v
}

// worker does what a State wants done, and tells how it went.
type worker struct {
	ctx      context.Context // the time of one Run
	daemon   Daemon
	settings Settings
	tell     func(Event)
	group    sync.WaitGroup
}

func (w *worker) do(effect Effect) {
	switch effect := effect.(type) {
	case Ask:
		w.group.Go(func() { w.tell(w.daemon.ask(w.ctx, effect.ID)) })
	case Look:
		w.group.Go(func() { w.tell(w.daemon.look(w.ctx, w.settings, effect.Health)) })
	}
}
