package kata

import (
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/crust-proxy/crust-proxy/test/check"
	kataemu "github.com/crust-proxy/crust-proxy/test/rig/kata"
)

// isKept tells how many connections are kept; -1 is that none is ever.
func isKept(b *bench) int {
	k := &b.h.client.kept
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.conns == nil {
		return -1
	}
	return len(k.conns)
}

func keeping(t testing.TB, b *bench) {
	t.Helper()
	for isKept(b) < 0 {
		time.Sleep(time.Millisecond)
	}
}

func TestConnectionsAreKept(t *testing.T) {
	b := newBench(t, kataemu.Go)
	keeping(t, b)
	v := published(t, b, "a")
	dir := filepath.Join(b.cfg.GoSandboxes, "sb1")
	check.Must(t, os.MkdirAll(dir, 0o700))
	listener, err := net.Listen("unix", filepath.Join(dir, "shim-monitor.sock"))
	check.Must(t, err)
	var dialled atomic.Int64
	server := &http.Server{
		ConnState: func(_ net.Conn, state http.ConnState) {
			if state == http.StateNew {
				dialled.Add(1)
			}
		},
		Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, `{"volume_condition":{}}`)
		}),
		ReadHeaderTimeout: time.Minute,
	}
	var served sync.WaitGroup
	served.Go(func() { _ = server.Serve(listener) })
	t.Cleanup(func() { _ = server.Close(); served.Wait() })
	b.add(v.PodUID, "sb1") // else a connection finds out that it lives
	check.Must(t, kataemu.WriteID(b.cfg.DirectVolumes, v.Target, "sb1"))
	for range 10 {
		_, err := b.h.Stats(t.Context(), v)
		check.Must(t, err)
	}
	if n := dialled.Load(); n != 1 {
		t.Errorf("%d connections for 10 calls", n)
	}
	k, socket := &b.h.client.kept, b.h.cfg.socketOf("sb1", goShim)
	c := k.take(socket)
	if c == nil || isKept(b) != 0 {
		t.Fatal("no connection is kept")
	}
	k.put(c)
	c.expiry.Reset(0)
	for isKept(b) > 0 {
		time.Sleep(time.Millisecond)
	}
	for range 2 {
		_, err := b.h.Stats(t.Context(), v)
		check.Must(t, err)
	}
	if n := dialled.Load(); n != 2 {
		t.Errorf("%d connections, of which one was kept for too long", n)
	}
}

// A shim may close a connection that we keep; the next call must not suffer.
func TestKeptConnectionClosedByPeer(t *testing.T) {
	b := newBench(t, kataemu.Go)
	keeping(t, b)
	v := published(t, b, "a")
	shim := b.startShim(t, v, "sb1")
	for range 3 {
		_, err := b.h.Stats(t.Context(), v)
		check.Must(t, err)
		if isKept(b) != 1 {
			t.Fatal("no connection was kept")
		}
		shim.Kill(t)
		shim = b.startShim(t, v, "sb1")
	}
	_, err := b.h.Stats(t.Context(), v)
	check.Must(t, err)
}

func TestNothingIsKeptWithoutRun(t *testing.T) {
	b := newBench(t, kataemu.Go)
	keeping(t, b)
	v := published(t, b, "a")
	b.startShim(t, v, "sb1")
	for range 2 {
		_, err := b.h.Stats(t.Context(), v)
		check.Must(t, err)
		b.stop()
		if n := isKept(b); n != -1 {
			t.Errorf("%d connections are kept", n)
		}
	}
}
