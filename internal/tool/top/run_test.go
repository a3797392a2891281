package top

import (
	"bytes"
	"context"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// play is a Run on a pseudo terminal, and a user before it.
type play struct {
	t            *testing.T
	screen, keys *os.File
	mu           sync.Mutex
	shown        bytes.Buffer
	ended        chan error
	readers      sync.WaitGroup
	before       unix.Termios
}

func begin(ctx context.Context, f *fakeAdmin, settings Settings) *play {
	f.t.Helper()
	master, tty, err := pty.Open()
	check.Must(f.t, err)
	check.Must(f.t, pty.Setsize(master, &pty.Winsize{Rows: 24, Cols: 100}))
	p := &play{t: f.t, keys: master, screen: tty, ended: make(chan error, 1)}
	p.before = p.modes()
	p.readers.Go(func() {
		buffer := make([]byte, 4096)
		for {
			n, err := master.Read(buffer)
			p.mu.Lock()
			p.shown.Write(buffer[:n])
			p.mu.Unlock()
			if err != nil {
				return
			}
		}
	})
	d := f.daemon()
	go func() {
		p.ended <- Run(ctx, d, Terminal{In: tty, Out: tty, Env: []string{"TERM=xterm-256color", "NO_COLOR=1"}}, settings)
	}()
	return p
}

func (p *play) modes() unix.Termios {
	p.t.Helper()
	return *check.Value(unix.IoctlGetTermios(int(p.screen.Fd()), unix.TCGETS))(p.t)
}

func (p *play) text() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.shown.String()
}

// sees waits until a text was drawn since the last call of press.
func (p *play) sees(text string) {
	p.t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if strings.Contains(p.text(), text) {
			return
		}
	}
	p.t.Fatalf("never saw %q in %q", text, p.text())
}

func (p *play) press(keys string) {
	p.t.Helper()
	p.mu.Lock()
	p.shown.Reset()
	p.mu.Unlock()
	check.Must(p.t, check.Err(p.keys.WriteString(keys)))
}

func (p *play) ends() {
	p.t.Helper()
	select {
	case err := <-p.ended:
		check.Must(p.t, err)
	case <-time.After(2 * time.Minute):
		p.t.Fatal("it does not end")
	}
}

// over waits for the end and looks whether the terminal is as it was.
func (p *play) over() {
	p.t.Helper()
	p.ends()
	check.That(p.t, p.modes() == p.before, "the terminal's modes are not as they were")
	p.sees("\x1b[?1049l") // the shell's screen is back
	p.sees("\x1b[?25h")   // and its cursor
	_ = p.screen.Close()
	p.readers.Wait()
	_ = p.keys.Close()
}

func TestOnATerminal(t *testing.T) {
	f := newFake(t, volumes())
	p := begin(t.Context(), f, Settings{Interval: time.Second})
	p.sees("pvc-postgres-0")
	p.sees("node-7")
	p.sees("75%") // fresh numbers
	p.press("/web\r")
	p.sees("of 6 shown")
	p.press("\r")
	p.sees("only-databases")
	p.press("?")
	p.sees("any key")
	p.press("x\x1b")
	p.sees("USAGE")
	added := proto.CloneOf(volumes()[0])
	added.Id, added.TargetPath = strings.Repeat("f", 64), "/x/pvc-new/mount"
	f.put(added)
	p.press("\x1b")
	p.sees("pvc-new")
	check.That(t, !strings.Contains(p.text(), "\x1b[31m"), "colours, though NO_COLOR is set")
	p.press("q")
	p.over()
}

func TestOnATerminalUntilTheContextEnds(t *testing.T) {
	f := newFake(t, volumes())
	f.takes = time.Hour // nobody waits for a sandbox that hangs
	ctx, cancel := context.WithCancel(t.Context())
	p := begin(ctx, f, Settings{Interval: time.Second})
	p.sees("pvc-postgres-0")
	cancel()
	p.over()
}

func TestTheTerminalGoes(t *testing.T) {
	f := newFake(t, volumes())
	p := begin(t.Context(), f, Settings{Interval: time.Second})
	p.sees("pvc-postgres-0")
	_ = p.keys.Close()
	p.ends()
	_ = p.screen.Close()
	p.readers.Wait()
}
