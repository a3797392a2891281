package cli

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/internal/tool/command"
	"github.com/crust-proxy/crust-proxy/test/check"
)

const (
	unitRuns  = "LoadState=loaded\nActiveState=active\nSubState=running\nResult=success\nStateChangeTimestamp=today\n"
	unitFails = "LoadState=loaded\nActiveState=deactivating\nSubState=stop-post\nResult=exit-code\nStateChangeTimestamp=today\n"
	badKey    = `{"level":"error","msg":"ended with an error","error":"config.yaml:3: unknown key \u001b[2J"}`
)

// systemd plays systemd: it gives these states of the unit one after the other, the last one for ever.
func (b *bench) systemd(log string, states ...string) {
	check.Must(b.t, os.MkdirAll(b.node.Root+"/run/systemd/system", 0o755))
	b.asks = func(_ context.Context, program string, args ...string) ([]byte, error) {
		state := states[0]
		states = states[min(1, len(states)-1):]
		switch {
		case program == "systemctl" && args[0] == "show":
			return []byte(state), nil
		case program == "journalctl" && slices.Contains(args, "_SYSTEMD_UNIT=crust-proxy.service"):
			return []byte(log), nil
		}
		b.t.Errorf("%s %q is run", program, args)
		return nil, nil
	}
}

func TestWithoutADaemonSystemdIsAsked(t *testing.T) {
	const says, failed = "systemd says that crust-proxy.service is deactivating (stop-post), result exit-code, since today", "config.yaml:3: unknown key"
	for name, c := range map[string]struct {
		set         func(*bench)
		args        string
		want, never []string
	}{
		"no socket":             {func(b *bench) { b.node.UID = 0 }, "list", []string{says, failed, "crust-proxy validate"}, []string{"sudo", "\x1b"}},
		"nobody listens":        {func(b *bench) { b.node.UID = 0; b.deadSocket() }, "list", []string{says, failed, "crust-proxy validate"}, []string{"sudo"}},
		"closed, to root":       {func(b *bench) { b.node.UID = 0; b.closing() }, "list", []string{says, "authorization.admin.uids"}, []string{"sudo"}},
		"not root":              {func(*bench) {}, "list", []string{says}, []string{failed}},
		"in a pod":              {inPod, "list", []string{"not running"}, []string{"systemd"}},
		"another socket":        {func(*bench) {}, "list --socket /nowhere", []string{"not running"}, []string{"systemd says"}},
		"a socket of systemd's": {(*bench).silent, "list", []string{"nobody answers", says}, []string{"sandbox may hang"}},
		"a daemon that hangs":   {func(b *bench) { b.systemd("", unitRuns); b.silent() }, "list --timeout 50ms", []string{"does not answer on", "active (running)"}, []string{"sandbox"}},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			b.systemd("crust-proxy: older\n"+badKey+"\n{\"level\":\"info\"}\n", unitFails)
			c.set(b)
			begin := time.Now()
			r := b.run(strings.Fields(c.args)...)
			check.Equal(t, r.code, command.ExitFailure, "the exit code")
			check.Says(t, "the error", r.err, c.want...)
			for _, never := range c.never {
				check.That(t, !strings.Contains(r.err, never), "%q says %q", r.err, never)
			}
			took := time.Since(begin)
			check.That(t, took <= mostConnect/2, "it took %v", took)
		})
	}
}

// silent is a socket that takes connections, and on which nobody answers.
func (b *bench) silent() {
	l := listenRaw(b.t, b.socket)
	b.t.Cleanup(func() { _ = l.Close() })
}

// TestADaemonThatIsStartedAgainIsAwaited: it was killed, and systemd holds the connection meanwhile.
func TestADaemonThatIsStartedAgainIsAwaited(t *testing.T) {
	b := newBench(t)
	b.systemd("", unitFails, unitRuns)
	l := listenRaw(t, b.socket)
	start := time.AfterFunc(unitPatience+3*unitAgain, func() { b.serveOn(l) })
	defer start.Stop()
	r := b.run("version")
	check.That(t, r.code == command.ExitOK && strings.Contains(r.out, sys.Version()), "%+v", r)
}

// TestDaemonThatIsBeingStarted is no error of the node.
func TestDaemonThatIsBeingStarted(t *testing.T) {
	var now unix.Timespec
	check.Must(t, unix.ClockGettime(unix.CLOCK_MONOTONIC, &now))
	for began, want := range map[string]string{
		fmt.Sprintf("NRestarts=0\nStateChangeTimestampMonotonic=%d", now.Nano()/1000):                            "wait  daemon            starting: crust-proxy does not answer",
		fmt.Sprintf("NRestarts=0\nStateChangeTimestampMonotonic=%d", now.Nano()/1000-2*startTime.Microseconds()): "error daemon",
		fmt.Sprintf("NRestarts=7\nStateChangeTimestampMonotonic=%d", now.Nano()/1000):                            "error daemon",
	} {
		b := newBench(t)
		b.systemd("", strings.NewReplacer("=active", "=activating", "running", "start").Replace(unitRuns)+began+"\n")
		b.silent()
		r := b.run("doctor", "--timeout", "50ms")
		check.That(t, strings.HasPrefix(r.out, want), "%s: %+v", began, r)
	}
}

// TestConnectionThatIsNeverServed has what gRPC says after mostConnect.
func TestConnectionThatIsNeverServed(t *testing.T) {
	err := (&client{daemon: &daemon{}, socket: "/s"}).explain(status.Error(codes.Unavailable, `connection error: desc = "error reading server preface: context deadline exceeded"`))
	check.That(t, strings.HasPrefix(err.Error(), "crust-proxy does not answer on /s"), "%v", err)
}

func TestLastErrorOfALog(t *testing.T) {
	for log, want := range map[string]string{
		"": "", "\n{\"level\":\"warn\"}\nnonsense": "",
		"crust-proxy: a\n{\"level\":\"info\"}":  "crust-proxy: a",
		"crust-proxy: a\n{\"level\":\"error\"}": "{\"level\":\"error\"}",
		"panic: a\n\ngoroutine 1:\n\tmain.go:1": "panic: a",
	} {
		check.Equal(t, lastError(log), want, "%q", log)
	}
}
