package vm

import (
	"context"
	"net"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/ttrpc"

	"github.com/crust-proxy/crust-proxy/reference/handler"
	"github.com/crust-proxy/crust-proxy/reference/vm/wire"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestSupervisorThatHangs is killed by a SIGKILL of its sandbox or of a container, which also kills a proxy that is stopped,
// and by a delete of the sandbox. Any other signal kills nothing.
func TestSupervisorThatHangs(t *testing.T) {
	check.NeedsRoot(t)
	for _, c := range []struct {
		name              string
		args              []string
		supervisor, proxy bool // whether it lives then
	}{
		{"sandbox", []string{"kill", "sb", "KILL"}, false, true},
		{"container", []string{"kill", "c", "9"}, false, false},
		{"term", []string{"kill", "c", "TERM"}, true, true},
		{"delete", []string{"delete", "--force", "sb"}, false, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			cfg := Config{StateDir: t.TempDir(), HangTimeoutSeconds: 1}
			check.Must(t, os.Mkdir(string(cfg.sandbox("sb")), 0o700))
			listener := check.Value(net.Listen("unix", cfg.sandbox("sb").controlSocket()))(t)
			defer func() { _ = listener.Close() }()
			supervisor, cmd := sleeper(t)
			proxy, other := sleeper(t)
			check.Must(t, cmd.Process.Signal(syscall.SIGSTOP))
			check.Must(t, other.Process.Signal(syscall.SIGSTOP))
			check.Must(t, cfg.writeRecord(&record{ID: "sb", Sandbox: "sb", Process: supervisor}))
			check.Must(t, cfg.writeRecord(&record{ID: "c", Sandbox: "sb", Process: proxy}))
			cmdline := &command{cfg: cfg, in: handler.ParseArgs(c.args)}
			run := map[string]func() error{"kill": cmdline.kill, "delete": cmdline.delete}[c.args[0]]
			err := run()
			check.That(t, (err != nil) == c.supervisor && supervisor.Lives() == c.supervisor && proxy.Lives() == c.proxy,
				"%v; the supervisor lives: %v, the proxy: %v", err, supervisor.Lives(), proxy.Lives())
		})
	}
}

// ending is a supervisor that ends at once, and knows how long it was given.
type ending struct {
	wire.SupervisorService
	cmd  *exec.Cmd
	time time.Duration
}

func (e *ending) EndSandbox(ctx context.Context, _ *wire.EndSandboxRequest) (*wire.Empty, error) {
	until, _ := ctx.Deadline()
	e.time = time.Until(until)
	return new(wire.Empty), e.cmd.Process.Kill()
}

// TestTimeToEndASandbox: what the guest has not written is lost with a supervisor that is killed because it is slow.
func TestTimeToEndASandbox(t *testing.T) {
	check.NeedsRoot(t)
	for _, run := range []func(*command) error{(*command).kill, (*command).delete} {
		cfg := Config{StateDir: t.TempDir(), HangTimeoutSeconds: 90}
		supervisor, cmd := sleeper(t)
		service := &ending{cmd: cmd}
		supervised(t, cfg.sandbox("sb"), func(s *ttrpc.Server) { wire.RegisterSupervisorService(s, service) })
		check.Must(t, cfg.writeRecord(&record{ID: "sb", Sandbox: "sb", Process: supervisor}))
		check.Must(t, run(&command{cfg: cfg, in: handler.ParseArgs([]string{"any", "--force", "sb"})}))
		check.That(t, service.time > 80*time.Second, "it has %v", service.time)
	}
}
