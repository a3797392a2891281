package telemetry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

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

// pipes is a listener whose connections are in memory, so that a test needs no real time.
type pipes chan net.Conn

func (p pipes) Accept() (net.Conn, error) {
	if conn, open := <-p; open {
		return conn, nil
	}
	return nil, net.ErrClosed
}

func (p pipes) Close() error { close(p); return nil }

func (pipes) Addr() net.Addr { return &net.UnixAddr{} }

func (p pipes) dial(context.Context, string, string) (net.Conn, error) {
	ours, theirs := net.Pipe()
	p <- theirs
	return ours, nil
}

// TestIdleConnectionsDoNotKeepProbesOut: kubelet restarts a daemon that its probes do not reach.
func TestIdleConnectionsDoNotKeepProbesOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		listener := make(pipes, 2*maxConns)
		start(t, &Server{Listen: "pipes", Metrics: NewMetrics("test").Registry, Log: zap.NewNop(), listener: listener})
		for range maxConns + 16 {
			_, _ = listener.dial(t.Context(), "", "")
		}
		began := time.Now()
		probe := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: listener.dial}}
		// It waits for a place among maxConns, and no longer than the idle ones may take.
		if code, _ := get(t, probe, "/healthz"); code != http.StatusOK || time.Since(began) != headerTime {
			t.Errorf("got %d after %v", code, time.Since(began))
		}
	})
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
