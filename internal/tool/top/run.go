package top

import (
	"context"
	"errors"
	"io"
	"os"
	"sync"
	"time"

	tea "charm.land/bubbletea/v2"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/tool/printer"
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

// model is the State as bubbletea needs it.
type model struct {
	state  *State
	ctx    context.Context // ends with Run
	daemon Daemon
	// exists reports whether the terminal still exists.
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
	for _, effect := range m.state.Apply(msg) {
		commands = append(commands, m.command(effect))
	}
	return m, tea.Batch(commands...)
}

func (m *model) command(effect Effect) tea.Cmd {
	switch effect := effect.(type) {
	case FetchStats:
		return func() tea.Msg { return m.daemon.fetchStats(m.ctx, effect.ID) }
	case Poll:
		return func() tea.Msg {
			// The watch reports when the daemon is away, but not when it hangs.
			polled, err := m.daemon.poll(m.ctx, m.state.settings, effect.Health)
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
