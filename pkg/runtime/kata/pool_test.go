package kata

import (
	"context"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	kataemu "github.com/crust-proxy/crust-proxy/test/rig/kata"
)

func polling(t testing.TB, b *bench) {
	t.Helper()
	for {
		b.h.client.pool.mu.Lock()
		on := b.h.client.pool.sweeper
		b.h.client.pool.mu.Unlock()
		if on {
			return
		}
		time.Sleep(time.Millisecond)
	}
}

func idle(b *bench, socket string) int {
	b.h.client.pool.mu.Lock()
	defer b.h.client.pool.mu.Unlock()
	return len(b.h.client.pool.idle[socket])
}

func TestConnectionsAreKept(t *testing.T) {
	b := newBench(t, kataemu.Go)
	polling(t, b)
	v := published(t, b, "a")
	dir := filepath.Join(b.cfg.GoSandboxes, "sb1")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("unix", filepath.Join(dir, "shim-monitor.sock"))
	if err != nil {
		t.Fatal(err)
	}
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
	if err := kataemu.WriteID(b.cfg.DirectVolumes, v.Target, "sb1"); err != nil {
		t.Fatal(err)
	}
	for range 10 {
		if _, err := b.h.Stats(t.Context(), v); err != nil {
			t.Fatal(err)
		}
	}
	if n := dialled.Load(); n != 1 {
		t.Errorf("%d connections for 10 calls", n)
	}
	socket := b.h.cfg.socketOf("sb1", goShim)
	b.h.client.pool.sweep(time.Now().Add(idleFor + time.Second))
	if n := idle(b, socket); n != 0 {
		t.Errorf("%d connections are kept too long", n)
	}
	if _, err := b.h.Stats(t.Context(), v); err != nil {
		t.Fatal(err)
	}
	b.h.SandboxGone("sb1")
	if n := idle(b, socket); n != 0 {
		t.Errorf("%d connections outlive their sandbox", n)
	}
}

// A shim may close a connection that we keep; the next call must not suffer.
func TestKeptConnectionClosedByPeer(t *testing.T) {
	b := newBench(t, kataemu.Go)
	polling(t, b)
	v := published(t, b, "a")
	shim := b.startShim(t, v, "sb1")
	for range 3 {
		if _, err := b.h.Stats(t.Context(), v); err != nil {
			t.Fatal(err)
		}
		if idle(b, b.h.cfg.socketOf("sb1", goShim)) != 1 {
			t.Fatal("no connection was kept")
		}
		shim.Kill(t)
		shim = b.startShim(t, v, "sb1")
	}
	if _, err := b.h.Stats(t.Context(), v); err != nil {
		t.Fatal(err)
	}
}

func TestNothingIsKeptWithoutRun(t *testing.T) {
	b := newBench(t, kataemu.Go)
	v := published(t, b, "a")
	b.startShim(t, v, "sb1")
	b.stop()
	if _, err := b.h.Stats(t.Context(), v); err != nil {
		t.Fatal(err)
	}
	if n := idle(b, b.h.cfg.socketOf("sb1", goShim)); n != 0 {
		t.Errorf("%d connections are kept", n)
	}
}

func BenchmarkStats(b *testing.B) {
	node := newBench(b, kataemu.Go)
	polling(b, node)
	v := published(b, node, "a")
	node.startShim(b, v, "sb1")
	b.Run("handler", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := node.h.Stats(b.Context(), v); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("dial-each-time", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if err := dialAndAsk(node.h.cfg.socketOf("sb1", goShim), v.Device.Path); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// dialAndAsk is what drivers do today, through Kata's own library.
func dialAndAsk(socket, device string) error {
	transport := &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var dialer net.Dialer
			return dialer.DialContext(ctx, "unix", socket)
		},
	}
	client := http.Client{Transport: transport, Timeout: 5 * time.Second}
	response, err := client.Get("http://shim" + statsPath + escape(escape(device)))
	if err != nil {
		return err
	}
	body, err := io.ReadAll(response.Body)
	if err == nil {
		_, err = parseStatsJSON(body)
	}
	_ = response.Body.Close()
	return err
}

func BenchmarkPublishRetract(b *testing.B) {
	node := newBench(b, kataemu.Go)
	v := node.Volume("a")
	b.ReportAllocs()
	for b.Loop() {
		if _, err := node.h.Publish(b.Context(), v); err != nil {
			b.Fatal(err)
		}
		if err := node.h.Retract(b.Context(), v); err != nil {
			b.Fatal(err)
		}
	}
}
