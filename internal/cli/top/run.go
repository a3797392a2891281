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

// Daemon makes the calls to the daemon.
type Daemon struct {
	adminv1.AdminClient
	// Explain turns an error of a call into one line of text.
	Explain func(error) string
	// Timeout bounds a call.
	Timeout time.Duration
}

// Terminal is where the volumes are shown.
type Terminal struct {
	In  io.Reader
	Out io.Writer
	// Env is the environment; it may forbid colours.
	Env []string
	// Exists tells whether the terminal still exists; it may be nil.
	Exists func() bool
}

const (
	tick = 500 * time.Millisecond
	// frames bounds how often a second the screen is drawn.
	frames = 20
)

// Run shows the volumes until the user or ctx ends it.
func Run(ctx context.Context, d Daemon, t Terminal, settings Settings) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	program := tea.NewProgram(&model{state: New(settings, time.Now()), ctx: ctx, daemon: d},
		tea.WithInput(t.In), tea.WithOutput(t.Out), tea.WithEnvironment(t.Env), tea.WithFPS(frames), tea.WithoutSignalHandler())
	send := func(e Event) { program.Send(e) }
	var group sync.WaitGroup
	group.Go(func() { d.watch(ctx, settings, send) })
	group.Go(func() { clock(ctx, t.Exists, send, program.Quit) })
	_, err := program.Run()
	cancel()
	group.Wait()
	if errors.Is(err, tea.ErrProgramKilled) && t.Exists != nil && !t.Exists() {
		return nil // the terminal is gone: nobody can read the error
	}
	return err
}

// clock sends the time until ctx ends or the terminal is gone, and then quits the
// program.
func clock(ctx context.Context, exists func() bool, send func(Event), quit func()) {
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			quit()
			return
		case now := <-ticker.C:
			if exists != nil && !exists() {
				quit()
				return
			}
			send(Clock{Now: now})
		}
	}
}

// model is the State as bubbletea needs it.
type model struct {
	state  *State
	ctx    context.Context // ends with Run
	daemon Daemon
}

// Init starts nothing: events from outside are sent to the program.
func (*model) Init() tea.Cmd { return nil }

// Update turns a message into an event, and effects into commands.
func (m *model) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
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
	var commands []tea.Cmd
	for _, effect := range m.state.Apply(event) {
		commands = append(commands, m.command(effect))
	}
	return m, tea.Batch(commands...)
}

func (m *model) command(effect Effect) tea.Cmd {
	switch effect := effect.(type) {
	case Quit:
		return tea.Quit
	case Suspend:
		return tea.Suspend
	case FetchStats:
		return func() tea.Msg { return m.daemon.fetchStats(m.ctx, effect.ID) }
	case Poll:
		settings := m.state.settings
		return func() tea.Msg { return m.daemon.poll(m.ctx, settings, effect.Health) }
	}
	return nil
}

// View draws on the alternate screen, so that the shell's is restored at the end.
func (m *model) View() tea.View {
	v := tea.NewView(m.state.View())
	v.AltScreen = true
	return v
}
