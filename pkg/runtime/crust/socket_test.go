package crust

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
	handlerv1 "github.com/crust-proxy/crust-proxy/proto/crust/handler/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/handlers"
)

// odd is an agent whose answer to stats is given.
type odd struct {
	handlerv1.UnimplementedHandlerServer
	err   error
	reply *handlerv1.GetVolumeStatsResponse
}

func (o *odd) GetVolumeStats(context.Context, *handlerv1.GetVolumeStatsRequest) (*handlerv1.GetVolumeStatsResponse, error) {
	return o.reply, o.err
}

// socketOnly has a volume whose sandbox can be asked by a socket alone.
func socketOnly(t *testing.T) (*bench, *volume.Volume) {
	t.Helper()
	b := newBench(t, bySocket)
	v := published(t, b, "a")
	b.startSandbox(t, v, "sb1")
	return b, v
}

func TestCodesOfSockets(t *testing.T) {
	b, v := socketOnly(t)
	for code, want := range map[codes.Code]volume.Kind{
		codes.Unimplemented: volume.Unsupported, codes.InvalidArgument: volume.Unsupported, codes.OutOfRange: volume.OutOfRange,
		codes.Internal: volume.Refused, codes.FailedPrecondition: volume.InUse, codes.Unknown: volume.Refused,
		codes.DeadlineExceeded: volume.Timeout, codes.ResourceExhausted: volume.Exhausted,
		codes.Unavailable: volume.Internal, // and there is no program to turn to
	} {
		path := serveOdd(t, b, code.String(), &odd{err: status.Error(code, "so\x1b]0;it\x07 is\nand more")})
		b.leave(t, v, "sb1", "", path)
		handlers.WantError(t, check.Err(b.h.Stats(t.Context(), v)), want, v, "sb1", "so?]0;it? is")
	}
	huge := serveOdd(t, b, "huge", &odd{reply: &handlerv1.GetVolumeStatsResponse{SandboxId: strings.Repeat("x", maxAnswer)}})
	b.leave(t, v, "sb1", "", huge)
	handlers.WantError(t, check.Err(b.h.Stats(t.Context(), v)), volume.Exhausted, v, "sb1", "larger")
}

func serveOdd(t *testing.T, b *bench, name string, o *odd) string {
	t.Helper()
	path := filepath.Join(b.cfg.SocketDirs[0], name)
	serve(t, path, o)
	return path
}

// A socket that may not be used is not, and the program is asked instead.
func TestSocketsThatAreNotUsed(t *testing.T) {
	b := newBench(t, bySocket|byProgram)
	v := published(t, b, "a")
	dir := b.cfg.SocketDirs[0]
	outside := filepath.Join(b.dir, "outside")
	serve(t, outside, b.agent)
	check.Must(t, os.Symlink(outside, filepath.Join(dir, "link")))
	check.Must(t, os.Symlink(b.dir, filepath.Join(dir, "up")))
	check.Must(t, os.WriteFile(filepath.Join(dir, "file"), nil, 0o600))
	check.StaleSocket(t, filepath.Join(dir, "dead"))
	for name, c := range map[string]struct{ path, text string }{
		"outside":           {outside, "below none of"},
		"climbing":          {dir + "/../outside", "below none of"},
		"a link":            {dir + "/link", "symbolic links"},
		"through a link":    {dir + "/up/outside", "symbolic links"},
		"a file":            {dir + "/file", "not a socket"},
		"missing":           {dir + "/missing", "no such file"},
		"the directory":     {dir, "below none of"},
		"a similar name":    {dir + "x/agent", "below none of"},
		"nobody listens":    {dir + "/dead", "refused"},
		"a path by halves":  {dir + "//agent", "below none of"},
		"the agent's child": {dir + "/agent/x", "not a directory"},
	} {
		t.Run(name, func(t *testing.T) {
			b.way = bySocket | byProgram
			b.startSandbox(t, v, "sb1")
			b.leave(t, v, "sb1", b.cfg.Programs[0], c.path)
			before := b.agent.asked.Load()
			check.Value(b.h.Stats(t.Context(), v))(t)
			check.That(t, b.agent.asked.Load() == before, "the program was not asked")
			check.Must(t, os.Remove(b.path(v, "runtime-cli")))
			_, err := b.h.Stats(t.Context(), v)
			kind := volume.Internal
			if strings.Contains(c.text, "none") || strings.Contains(c.text, "not a socket") {
				kind = volume.Denied
			}
			handlers.WantError(t, err, kind, v, "sb1", c.text)
		})
	}
}

func TestWhoServesTheSocket(t *testing.T) {
	b, v := socketOnly(t)
	b.h.asker.conns.sockets.owner++
	handlers.WantError(t, check.Err(b.h.Stats(t.Context(), v)), volume.Denied, v, "sb1", "belongs to user")
	conn := check.Value(net.Dial("unix", b.agent.path))(t)
	defer func() { check.Must(t, conn.Close()) }()
	check.Kind(t, b.h.asker.conns.sockets.checkPeer(conn, b.agent.path), volume.Denied, "served by user") // another user's server
	b.h.asker.conns.sockets.owner--
	check.Must(t, b.h.asker.conns.sockets.checkPeer(conn, b.agent.path))
}

func TestConnectionsAreKept(t *testing.T) {
	b, v := socketOnly(t)
	check.Eventually(t, "connections are kept", func() bool {
		b.stats(t, v)
		return kept(b) == 1
	})
	// An agent ends when no sandbox is left, and starts anew with the next.
	b.agent.stop()
	handlers.WantError(t, check.Err(b.h.Stats(t.Context(), v)), volume.Internal, v, "sb1", "cannot be asked")
	b.agent.start(t)
	check.Eventually(t, "the new agent is found", func() bool {
		_, err := b.h.Stats(t.Context(), v)
		return err == nil
	})
	conn, done, err := b.h.asker.conns.get(b.agent.path)
	check.Must(t, err)
	b.stop()
	check.That(t, conn.GetState() != connectivity.Shutdown, "the end of Run cuts off a call under way")
	done()
	check.Value(b.h.Stats(t.Context(), v))(t) // without Run
	check.That(t, kept(b) == 0, "connections are kept without Run")
}

// Sockets of sandboxes that have ended do not keep those of new ones out, as where each
// sandbox has a socket of its own.
func TestConnectionsOfEndedSandboxesAreDropped(t *testing.T) {
	b, v := socketOnly(t)
	c := b.h.asker.conns
	check.Eventually(t, "connections are kept", func() bool { c.mu.Lock(); defer c.mu.Unlock(); return c.keep })
	for i := range maxConns {
		_, done, err := c.get(fmt.Sprintf("%s/ended-%d", b.cfg.SocketDirs[0], i))
		check.Must(t, err)
		if i == 0 { // it is still in use
			defer done()
			continue
		}
		done()
	}
	b.stats(t, v)
	c.mu.Lock()
	defer c.mu.Unlock()
	check.That(t, c.open[b.agent.path] != nil && c.open[b.cfg.SocketDirs[0]+"/ended-0"] != nil && len(c.open) == 2,
		"%d connections are kept", len(c.open))
}

func kept(b *bench) int {
	b.h.asker.conns.mu.Lock()
	defer b.h.asker.conns.mu.Unlock()
	return len(b.h.asker.conns.open)
}

// A server that speaks no gRPC is one that hangs.
func TestSocketThatIsNoGRPC(t *testing.T) {
	b, v := socketOnly(t)
	listener := check.Value(net.Listen("unix", filepath.Join(b.cfg.SocketDirs[0], "echo")))(t)
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Write([]byte("HTTP/1.1 200 OK\r\n\r\nhello"))
			_ = conn.Close()
		}
	}()
	t.Cleanup(func() { _ = listener.Close() })
	b.leave(t, v, "sb1", "", listener.Addr().String())
	_, err := b.h.Stats(check.Within(t, time.Second), v)
	kind := volume.KindOf(err)
	check.That(t, kind == volume.Internal || kind == volume.Timeout, "%v: %v", kind, err)
}

func TestFreezeAndThaw(t *testing.T) {
	for _, w := range []way{bySocket, byProgram} {
		b := newBench(t, w)
		v := published(t, b, "a")
		check.Kind(t, b.h.Freeze(t.Context(), v, time.Minute), volume.NoSandbox) // without a sandbox
		sandbox := b.startSandbox(t, v, "sb1")
		check.Must(t, b.h.Freeze(t.Context(), v, time.Minute))
		got := b.agent.frozen.Load()
		check.That(t, w != bySocket || got == 60, "frozen for %d s", got)
		check.Must(t, b.h.Thaw(t.Context(), v))
		handlers.WantError(t, b.h.Freeze(t.Context(), v, time.Millisecond), volume.Invalid, v, "a second")
		sandbox.Refuse()
		handlers.WantError(t, b.h.Thaw(t.Context(), v), volume.Refused, v, "sb1", "thaw")
	}
}

// TestSweepAfterASlowFreeze: its time begins when the dirty data is written.
func TestSweepAfterASlowFreeze(t *testing.T) {
	b := newBench(t, bySocket)
	v := published(t, b, "a")
	b.startSandbox(t, v, "sb1")
	h := &Handler{asker: b.h.asker, expiry: &expiry{ends: make(chan time.Time, 2)}}
	check.Must(t, h.Freeze(t.Context(), v, time.Minute))
	check.Require(t, len(h.expiry.ends) == 2, "sweeps: %d", len(h.expiry.ends))
	before, after := <-h.expiry.ends, <-h.expiry.ends
	check.That(t, after.After(before), "swept at %v and %v", before, after)
}

// TestFreezeWithoutAnswer: the volume may be frozen, and the program, which would find it so, is not asked: its refusal
// would say that this freeze holds no writes.
func TestFreezeWithoutAnswer(t *testing.T) {
	b := newBench(t, bySocket|byProgram)
	v := published(t, b, "a")
	b.startSandbox(t, v, "sb1").set("end")
	handlers.WantError(t, b.h.Freeze(t.Context(), v, time.Minute), volume.Timeout, v, "sb1", "try again")
	check.Must(t, b.h.Freeze(t.Context(), v, time.Minute)) // nobody serves the socket now
}

// A filesystem that a dead sandbox left frozen is thawed by whoever can.
func TestThawOfADeadSandboxsVolume(t *testing.T) {
	mark := filepath.Join(check.ShortDir(t), "frozen")
	b, v := askedBy(t, `[ "$2" = thaw ] && [ "$(cat `+mark+` 2>/dev/null)" = "$3" ] && { echo '{}'; exit 0; }; echo "not frozen" >&2; exit 6`)
	check.Must(t, os.Remove(b.path(v, "sb1")))
	handlers.WantError(t, b.h.Thaw(t.Context(), v), volume.InUse, v, "not frozen")
	check.Must(t, os.WriteFile(mark, []byte(v.ResolvedTarget), 0o600))
	check.Must(t, b.h.Thaw(t.Context(), v))
	b.h.cfg.Programs = nil
	handlers.WantError(t, b.h.Thaw(t.Context(), v), volume.NoSandbox, v)
}
