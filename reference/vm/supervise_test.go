package vm

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/reference/process"
	"github.com/crust-proxy/crust-proxy/reference/vm/initramfs"
	"github.com/crust-proxy/crust-proxy/reference/vm/wire"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// slow is a guest that answers every nth ping.
type slow struct {
	wire.SandboxService
	pings, nth int
}

func (s *slow) Ping(ctx context.Context, _ *wire.PingRequest) (*wire.PingResponse, error) {
	if s.pings++; s.pings%s.nth == 0 {
		return new(wire.PingResponse), nil
	}
	<-ctx.Done()
	return nil, ctx.Err()
}

// TestHangTimeout: a guest hangs when it has not answered for so long, and one that is slow does not.
func TestHangTimeout(t *testing.T) {
	const timeout = 90
	for nth, hangs := range map[int]bool{1: false, 3: false, 4: true, 1 << 30: true} {
		synctest.Test(t, func(t *testing.T) {
			s := &sandbox{cfg: Config{HangTimeoutSeconds: timeout}, guest: &wire.Client{SandboxService: &slow{nth: nth}}}
			began := time.Now()
			err := s.monitorPings(check.Within(t, time.Hour))
			took := time.Since(began)
			check.That(t, errors.Is(err, errHung) == hangs && (!hangs || took == timeout*time.Second),
				"one of %d pings answered: %v after %v", nth, err, took)
		})
	}
}

// writing is a guest that takes a while to write its volumes, and answers pings for some time.
type writing struct {
	wire.SandboxService
	began          time.Time
	takes, answers time.Duration
	done           bool
}

func (w *writing) Ping(ctx context.Context, _ *wire.PingRequest) (*wire.PingResponse, error) {
	if time.Since(w.began) < w.answers {
		return new(wire.PingResponse), nil
	}
	<-ctx.Done()
	return nil, ctx.Err()
}

func (w *writing) Shutdown(ctx context.Context, _ *wire.ShutdownRequest) (*wire.ShutdownResponse, error) {
	w.done = sys.Sleep(ctx, w.takes)
	return nil, errors.New("the connection is lost")
}

// TestSlowGuestIsNotKilled: a guest writes what its containers wrote for as long as its agent answers, within bounds.
func TestSlowGuestIsNotKilled(t *testing.T) {
	for _, c := range []struct{ takes, answers, want time.Duration }{
		{4 * time.Minute, time.Hour, 4 * time.Minute}, {4 * time.Minute, time.Minute, 150 * time.Second}, {time.Hour, time.Hour, shutdownTimeout},
	} {
		synctest.Test(t, func(t *testing.T) {
			w := &writing{began: time.Now(), takes: c.takes, answers: c.answers}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			s := &sandbox{cfg: Config{HangTimeoutSeconds: 90}, guest: &wire.Client{SandboxService: w}, volumes: new(volumes)}
			s.shutdownGuest(s.whileAnswering(ctx))
			took := time.Since(w.began)
			check.That(t, w.done == (c.want == c.takes) && took >= c.want-15*time.Second && took <= c.want,
				"%+v: it was waited for %v, and ended: %t", c, took, w.done)
		})
	}
}

// TestWordOfASupervisor: only the word itself is good. One that is being killed says nothing,
// and may still be among the processes when its end of the pipe is closed.
func TestWordOfASupervisor(t *testing.T) {
	for said, want := range map[string]string{readyWord: "", "": "its supervisor was killed", "it has no kernel": "it has no kernel"} {
		told, ready, err := os.Pipe()
		check.Must(t, err)
		_, err = ready.WriteString(said)
		check.Must(t, errors.Join(err, ready.Close()))
		got := ""
		if err := waitForReady(told, time.Minute); err != nil {
			got = err.Error()
		}
		check.That(t, got == want, "%q: %q, want %q", said, got, want)
		check.Must(t, told.Close())
	}
}

// TestLastWords: why the machine ends is told, however much its disks have to say after it.
func TestLastWords(t *testing.T) {
	const disk = "[ 11.4] I/O error, dev vda"
	agent, panicked := initramfs.MachineEnds+" the agent has ended", "[ 3.1] Kernel panic"
	for _, c := range []struct{ console, want []string }{
		{[]string{"booted", "1", "2", disk}, []string{"1", "2", disk}},
		{[]string{"booted", agent, disk, disk, disk, "reboot"}, []string{agent, disk, disk}},
		{[]string{"booted", panicked, "1", "2", "3"}, []string{panicked, "1", "2"}},
		{[]string{"booted", panicked}, []string{panicked}},
	} {
		check.Equal(t, lastWords(strings.Join(c.console, "\n")+"\n"), strings.Join(c.want, "; "), "of %q", c.console)
	}
}

// liar is a guest that says of a killed container that it is gone, or that it cannot be deleted.
type liar struct{ wire.ContainersService }

func (liar) SignalProcess(context.Context, *wire.SignalProcessRequest) (*wire.Empty, error) {
	return new(wire.Empty), nil
}

func (liar) WaitProcess(ctx context.Context, _ *wire.WaitProcessRequest) (*wire.WaitProcessResponse, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

func (liar) DeleteProcess(context.Context, *wire.DeleteProcessRequest) (*wire.Empty, error) {
	return nil, errors.New("it is busy")
}

// TestAGuestThatKeepsAContainer is killed: a pod whose container does not end, or cannot be
// deleted, could never be deleted.
func TestAGuestThatKeepsAContainer(t *testing.T) { synctest.Test(t, guestKeepsAContainer) }

// lied is a sandbox with the container "stays", whose guest lies, and "ended", which has ended.
func lied(t *testing.T, cfg Config) (*controlServer, *sandbox) {
	t.Helper()
	self := check.Value(process.Of(os.Getpid()))(t)
	check.Must(t, os.MkdirAll(string(cfg.sandbox("pod")), 0o700))
	check.Must(t, cfg.writeRecord(&record{ID: "stays", Sandbox: "pod", Process: self}))
	check.Must(t, cfg.writeRecord(&record{ID: "ended", Sandbox: "pod"}))
	guest := &wire.Client{ContainersService: liar{}}
	s := &sandbox{cfg: cfg, id: "pod", dir: cfg.sandbox("pod"), share: cfg.sandbox("pod").share(), guest: guest, hung: make(chan error, 1)}
	s.volumes = &volumes{sandbox: "pod", guest: guest, byName: make(map[string]*attachedVolume)}
	return &controlServer{ContainersService: guest, sandbox: s}, s
}

func guestKeepsAContainer(t *testing.T) {
	c, s := lied(t, Config{StateDir: t.TempDir()}) // whose hangTimeoutSeconds are over at once
	check.Value(c.SignalProcess(t.Context(), &wire.SignalProcessRequest{Process: &wire.Process{Container: "stays"}, Signal: 9}))(t)
	check.Is(t, <-s.hung, errHung)                                                                                                  // of a container that does not end
	check.Fails(t, check.Err(c.DeleteProcess(t.Context(), &wire.DeleteProcessRequest{Process: &wire.Process{Container: "stays"}}))) // or the container was deleted
	check.Is(t, <-s.hung, errHung)                                                                                                  // of a container that cannot be deleted
}

// TestAGuestThatKeepsAnExec is killed when its container has ended: containerd would wait for it.
func TestAGuestThatKeepsAnExec(t *testing.T) {
	for container, hangs := range map[string]bool{"ended": true, "stays": false} {
		synctest.Test(t, func(t *testing.T) {
			c, s := lied(t, Config{StateDir: t.TempDir(), HangTimeoutSeconds: 90})
			_, err := c.WaitProcess(check.Within(t, time.Hour), &wire.WaitProcessRequest{Process: &wire.Process{Container: container, Exec: "x"}})
			check.That(t, err != nil && (len(s.hung) == 1) == hangs, "%s: %v, declared hung: %d", container, err, len(s.hung))
		})
	}
}

// TestContainerOfAnEndingSandbox is refused: nobody would end it before its volumes are unplugged.
func TestContainerOfAnEndingSandbox(t *testing.T) {
	c := &controlServer{sandbox: &sandbox{stop: make(chan struct{})}}
	check.Value(c.EndSandbox(t.Context(), new(wire.EndSandboxRequest)))(t)
	check.Fails(t, check.Err(c.AddContainer(t.Context(), new(wire.AddContainerRequest))), "the sandbox is ending")
}

// TestTrialOfKVM: what a killed supervisor has left is no result, nor is a trial that took too long.
func TestTrialOfKVM(t *testing.T) {
	slow := filepath.Join(t.TempDir(), "qemu")
	check.Must(t, os.Chmod(filepath.Dir(filepath.Dir(slow)), 0o755))                //nolint:gosec // QEMU's user executes it
	check.Must(t, os.WriteFile(slow, []byte("#!/bin/sh\nexec sleep 100\n"), 0o755)) //nolint:gosec // a program
	_, err := os.Stat("/dev/kvm")
	for _, c := range []struct{ known, program, kept string }{
		{"", "/bin/false", "tcg\n"}, {"x\n", "/bin/false", "tcg\n"}, {"kvm\n", "/bin/false", "kvm\n"}, {"", slow, ""},
	} {
		if c.program == slow && (err != nil || os.Getuid() != 0) {
			continue // it is not tried
		}
		cfg := Config{StateDir: t.TempDir(), QEMU: c.program}
		check.Must(t, os.MkdirAll(cfg.cache(), 0o700))
		check.Must(t, os.WriteFile(cfg.cache()+"/accel", []byte(c.known), 0o600))
		kvm := check.Value(cfg.usesKVM(1_900_000_000))(t)
		kept := check.Value(os.ReadFile(cfg.cache() + "/accel"))(t)
		check.That(t, kvm == (c.known == "kvm\n") && string(kept) == c.kept, "%q and %s: %t, kept %q", c.known, c.program, kvm, kept)
	}
}
