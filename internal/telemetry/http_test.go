package telemetry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
)

// client asks over the unix socket.
func client(path string) *http.Client {
	return &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		},
	}}
}

func get(t *testing.T, c *http.Client, path string) (int, string) {
	t.Helper()
	for range 200 {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://node"+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		reply, err := c.Do(req)
		if err != nil {
			time.Sleep(5 * time.Millisecond) // it does not listen yet
			continue
		}
		body, err := io.ReadAll(reply.Body)
		if err = errors.Join(err, reply.Body.Close()); err != nil {
			t.Fatal(err)
		}
		return reply.StatusCode, string(body)
	}
	t.Fatal("no answer")
	return 0, ""
}

// start runs a server until the end of the test.
func start(t *testing.T, s *Server) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestServer(t *testing.T) {
	path := filepath.Join(t.TempDir(), "http.sock")
	var ready atomic.Bool
	start(t, &Server{Listen: "unix:" + path, Metrics: NewMetrics("test").Registry, Ready: func() error {
		if ready.Load() {
			return nil
		}
		return errors.New("the records are being read")
	}, Remarks: func() []string { return []string{"the cluster is away"} }})
	c := client(path)
	if code, body := get(t, c, "/healthz"); code != http.StatusOK || body != "ok\n" {
		t.Errorf("healthz: %d %q", code, body)
	}
	if code, body := get(t, c, "/readyz"); code != http.StatusServiceUnavailable || !strings.Contains(body, "records") {
		t.Errorf("readyz before: %d %q", code, body)
	}
	ready.Store(true)
	if code, body := get(t, c, "/readyz"); code != http.StatusOK || body != "ok\nthe cluster is away\n" {
		t.Errorf("readyz after: %d %q", code, body)
	}
	if code, body := get(t, c, "/metrics"); code != http.StatusOK || !strings.Contains(body, `crust_proxy_build_info{version="test"} 1`) {
		t.Errorf("metrics: %d", code)
	}
	if code, _ := get(t, c, "/debug/pprof/"); code != http.StatusNotFound {
		t.Errorf("pprof is there unasked: %d", code)
	}
}

// TestAHangingDaemonIsNotHealthy: by /healthz a DaemonSet's kubelet knows when to restart it.
func TestAHangingDaemonIsNotHealthy(t *testing.T) {
	path := filepath.Join(t.TempDir(), "http.sock")
	var hangs atomic.Bool
	s := &Server{
		Listen: "unix:" + path, Metrics: NewMetrics("test").Registry, Ready: func() error { return nil },
		Alive: func(ctx context.Context) error {
			if !hangs.Load() {
				return nil
			}
			<-ctx.Done()
			return fmt.Errorf("the core does not answer: %w", ctx.Err())
		},
	}
	start(t, s)
	c := client(path)
	if code, body := get(t, c, "/healthz"); code != http.StatusOK || body != "ok\n" {
		t.Errorf("a daemon that lives: %d %q", code, body)
	}
	hangs.Store(true)
	if code, body := get(t, c, "/healthz"); code != http.StatusServiceUnavailable || !strings.Contains(body, "does not answer") {
		t.Errorf("a daemon that hangs: %d %q", code, body)
	}
}

func TestServerWithProfiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "http.sock")
	start(t, &Server{Listen: "unix:" + path, Metrics: NewMetrics("test").Registry, Ready: func() error { return nil }, Pprof: true})
	if code, _ := get(t, client(path), "/debug/pprof/goroutine?debug=1"); code != http.StatusOK {
		t.Errorf("got %d", code)
	}
}

func TestServerThatCannotListen(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = taken.Close() }()
	for _, listen := range []string{taken.Addr().String(), "unix:" + t.TempDir(), "192.0.2.1:1"} {
		s := &Server{Listen: listen, Metrics: NewMetrics("test").Registry, Log: zap.NewNop(), Retry: time.Millisecond}
		s.Bind(t.Context())
		if err := s.Problem(); err == nil || !strings.Contains(err.Error(), listen) {
			t.Errorf("%s: got %v", listen, err)
		}
		start(t, s) // it goes on trying, and ends with its context
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := (&Server{}).Run(ctx); err != nil {
		t.Errorf("off: %v", err)
	}
}

// TestAddressThatComesFree is served as soon as it can be.
func TestAddressThatComesFree(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	core, logged := observer.New(zap.InfoLevel)
	s := &Server{Listen: taken.Addr().String(), Metrics: NewMetrics("test").Registry, Log: zap.New(core), Retry: time.Millisecond}
	s.Bind(t.Context())
	start(t, s)
	if s.Problem() == nil {
		t.Fatal("an address that is in use is no problem")
	}
	if err := taken.Close(); err != nil {
		t.Fatal(err)
	}
	c := &http.Client{Timeout: 5 * time.Second}
	for s.Problem() != nil && t.Context().Err() == nil {
		time.Sleep(time.Millisecond)
	}
	reply, err := c.Get("http://" + s.Listen + "/healthz")
	if err != nil {
		t.Fatal(err)
	}
	_ = reply.Body.Close()
	if told := logged.FilterLevelExact(zap.ErrorLevel).Len(); told != 1 {
		t.Errorf("the problem was logged %d times", told)
	}
	if logged.FilterMessageSnippet("served again").Len() != 1 {
		t.Errorf("its end was not logged: %v", logged.All())
	}
}

// TestConnectionsOfOnePeerAreBounded: whoever opens more loses them at once, and
// those who came before are served.
func TestConnectionsOfOnePeerAreBounded(t *testing.T) {
	s := &Server{Listen: "127.0.0.1:0", Metrics: NewMetrics("test").Registry, Log: zap.NewNop()}
	s.Bind(t.Context())
	address := s.listener.Addr().String()
	start(t, s)
	refused := 0
	for n := range 2 * maxConnsPerPeer {
		conn, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
		if n < maxConnsPerPeer {
			continue
		}
		if err := conn.SetReadDeadline(time.Now().Add(4 * time.Second)); err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
			refused++
		}
	}
	if refused != maxConnsPerPeer {
		t.Errorf("%d of %d connections over the bound were refused", refused, maxConnsPerPeer)
	}
	var other openConns
	open := func(peer string) (*limitedConn, bool) {
		conn := &limitedConn{of: &other, peer: peer}
		admitted, evicted := other.enter(conn)
		return conn, admitted && evicted == nil
	}
	first, _ := open("a")
	for range maxConnsPerPeer {
		open("a")
	}
	_, others := open("b")
	if _, over := open("a"); !others || over {
		t.Error("one peer takes the connections of another, or has no bound")
	}
	other.leave(first)
	if _, again := open("a"); !again {
		t.Error("a connection that was closed counts still")
	}
}

// TestManyPeersDoNotKeepProbesOut: kubelet restarts a daemon that its probes do not reach.
func TestManyPeersDoNotKeepProbesOut(t *testing.T) {
	s := &Server{Listen: "127.0.0.1:0", Metrics: NewMetrics("test").Registry, Log: zap.NewNop()}
	s.Bind(t.Context())
	address := s.listener.Addr().String()
	start(t, s)
	for n := range maxConns {
		dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 1, byte(n/maxConnsPerPeer))}}
		conn, err := dialer.DialContext(t.Context(), "tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
	}
	probe := &http.Client{Timeout: 10 * time.Second}
	for range 3 {
		reply, err := probe.Get("http://" + address + "/healthz")
		if err != nil {
			t.Fatalf("%d connections from %d addresses keep a probe out: %v", maxConns, maxConns/maxConnsPerPeer, err)
		}
		_ = reply.Body.Close()
		probe.CloseIdleConnections()
	}
}

// TestOnePeerDoesNotKeepOthersFromMetrics: it asks as often as it can, and takes no answer.
func TestOnePeerDoesNotKeepOthersFromMetrics(t *testing.T) {
	slow := make(chan struct{})
	var asked atomic.Int32
	s := &Server{Listen: "127.0.0.1:0", Log: zap.NewNop(), Metrics: prometheus.GathererFunc(func() ([]*dto.MetricFamily, error) {
		if asked.Add(1) <= scrapesOfOnePeer {
			<-slow
		}
		return nil, nil
	})}
	s.Bind(t.Context())
	url := "http://" + s.listener.Addr().String() + "/metrics"
	start(t, s)
	defer close(slow)
	dialer := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}
	other := &http.Client{Transport: &http.Transport{DialContext: dialer.DialContext}}
	for range maxConnsPerPeer - 1 {
		go func() {
			if reply, err := other.Get(url); err == nil {
				_ = reply.Body.Close()
			}
		}()
	}
	for end := time.Now().Add(20 * time.Second); asked.Load() < scrapesOfOnePeer && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	for client, want := range map[*http.Client]int{other: http.StatusServiceUnavailable, http.DefaultClient: http.StatusOK} {
		reply, err := client.Get(url)
		if err != nil {
			t.Fatal(err)
		}
		if _ = reply.Body.Close(); reply.StatusCode != want {
			t.Errorf("got %s, want %d", reply.Status, want)
		}
	}
}

func TestTracingOffAndAway(t *testing.T) {
	if tracer, end, err := (Tracing{}).Start(t.Context()); tracer != nil || err != nil || end(t.Context()) != nil {
		t.Errorf("off: %v, %v", tracer, err)
	}
	// Nobody listens there: calls do not notice.
	tracer, end, err := Tracing{Endpoint: "127.0.0.1:1", Insecure: true, SampleRatio: 1, Log: zap.NewNop()}.Start(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	_, span := tracer.Start(t.Context(), "call")
	span.End()
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("a span took %v", took)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_ = end(ctx)
}

// brokenExporter cannot send.
type brokenExporter struct{ sdktrace.SpanExporter }

func (brokenExporter) ExportSpans(context.Context, []sdktrace.ReadOnlySpan) error {
	return errors.New("no collector")
}

func TestLostSpansAreLogged(t *testing.T) {
	core, logged := observer.New(zap.WarnLevel)
	exporter := &loggedExporter{SpanExporter: brokenExporter{}, log: zap.New(core)}
	if err := exporter.ExportSpans(t.Context(), nil); err != nil {
		t.Errorf("the failure went on to OpenTelemetry: %v", err)
	}
	if logged.FilterMessageSnippet("spans are lost").Len() != 1 {
		t.Errorf("the loss was not logged: %v", logged.All())
	}
}
