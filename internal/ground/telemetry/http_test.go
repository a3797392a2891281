package telemetry

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// get asks the handler of a server.
func get(t *testing.T, s *Server, path string) (int, string) {
	t.Helper()
	reply := httptest.NewRecorder()
	s.handler().ServeHTTP(reply, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil))
	return reply.Code, reply.Body.String()
}

func TestServer(t *testing.T) {
	var notReady error
	hangs := false
	s := &Server{
		Metrics: NewMetrics("test").Registry, Remarks: func() []string { return []string{"the cluster is away"} },
		Ready: func() error { return notReady },
		Alive: func(ctx context.Context) error {
			if !hangs {
				return nil
			}
			<-ctx.Done()
			return fmt.Errorf("the core does not answer: %w", ctx.Err())
		},
	}
	want := func(path string, wantCode int, words string) {
		t.Helper()
		code, body := get(t, s, path)
		check.That(t, code == wantCode && strings.Contains(body, words), "%s: %d %q", path, code, body)
	}
	want("/healthz", http.StatusOK, "ok\n")
	want("/readyz", http.StatusOK, "ok\nthe cluster is away\n")
	want("/metrics", http.StatusOK, `crust_proxy_build_info{version="test"} 1`)
	want("/debug/pprof/", http.StatusNotFound, "")
	notReady, hangs, s.Pprof = errors.New("the records are being read"), true, true
	want("/readyz", http.StatusServiceUnavailable, "records")
	want("/healthz", http.StatusServiceUnavailable, "does not answer") // by it a DaemonSet's kubelet knows when to restart it
	want("/debug/pprof/goroutine?debug=1", http.StatusOK, "goroutine")
	s.Alive, s.Remarks, notReady = nil, nil, nil // as for crust-driver
	want("/healthz", http.StatusOK, "ok\n")
	want("/readyz", http.StatusOK, "ok\n")
}

func TestServerThatCannotListen(t *testing.T) {
	taken := check.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer func() { _ = taken.Close() }()
	for _, listen := range []string{taken.Addr().String(), "unix:" + t.TempDir(), "192.0.2.1:1"} {
		s := &Server{Listen: listen, Metrics: NewMetrics("test").Registry, Log: zap.NewNop(), Retry: time.Millisecond}
		s.Bind(t.Context())
		check.Fails(t, s.Problem(), listen)
		check.Running(t, s.Run) // it goes on trying, and ends with its context
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	check.NoError(t, (&Server{}).Run(ctx), "off")
}

// TestAddressThatComesFree is served as soon as it can be.
func TestAddressThatComesFree(t *testing.T) {
	taken := check.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	core, logged := observer.New(zap.InfoLevel)
	s := &Server{Listen: taken.Addr().String(), Metrics: NewMetrics("test").Registry, Log: zap.New(core), Retry: time.Millisecond, Ready: func() error { return nil }, Remarks: func() []string { return nil }}
	s.Bind(t.Context())
	check.Running(t, s.Run)
	check.Require(t, s.Problem() != nil, "an address that is in use is no problem")
	check.Must(t, taken.Close())
	for s.Problem() != nil && t.Context().Err() == nil {
		time.Sleep(time.Millisecond)
	}
	reply, err := http.Get("http://" + s.Listen + "/readyz")
	check.Must(t, err)
	_ = reply.Body.Close()
	told := logged.FilterLevelExact(zap.ErrorLevel).Len()
	check.That(t, told == 1, "the problem was logged %d times", told)
	check.That(t, logged.FilterMessageSnippet("served again").Len() == 1, "its end was not logged: %v", logged.All())
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
		alive := func(context.Context) error { return nil }
		check.Running(t, (&Server{Listen: "pipes", Metrics: NewMetrics("test").Registry, Alive: alive, Log: zap.NewNop(), listener: listener}).Run)
		for range maxConns + 16 {
			_, _ = listener.dial(t.Context(), "", "")
		}
		began := time.Now()
		probe := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: listener.dial}}
		// It waits for a place among maxConns, and no longer than the idle ones may take.
		reply, err := probe.Get("http://node/healthz")
		check.Must(t, err)
		_ = reply.Body.Close()
		check.That(t, reply.StatusCode == http.StatusOK && time.Since(began) == headerTime, "got %d after %v", reply.StatusCode, time.Since(began))
	})
}

// ofPeer is a connection from an address.
type ofPeer struct {
	net.Conn
	addr net.TCPAddr
}

func (c ofPeer) RemoteAddr() net.Addr { return &c.addr }

// TestOnePeerDoesNotKeepProbesOut, however many connections it opens and whether or not it repeats its requests.
func TestOnePeerDoesNotKeepProbesOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		listener := make(pipes, 2*maxConns)
		alive := func(context.Context) error { return nil }
		check.Running(t, (&Server{Listen: "pipes", Metrics: NewMetrics("test").Registry, Alive: alive, Log: zap.NewNop(), listener: listener}).Run)
		dial := func(last byte) (net.Conn, error) {
			ours, theirs := net.Pipe()
			listener <- ofPeer{theirs, net.TCPAddr{IP: net.IPv4(10, 0, 0, last), Port: 1}}
			return ours, nil
		}
		client := func(last byte) *http.Client {
			return &http.Client{Transport: &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) { return dial(last) }}}
		}
		for range maxConns + 16 {
			_, _ = dial(1)
		}
		began := time.Now()
		for n := range 2 * maxPerPeer { // also of the peer itself, as of kubelet on its node
			reply, err := client(byte(1 + n%2)).Get("http://node/healthz")
			check.Must(t, err)
			check.That(t, reply.StatusCode == http.StatusOK && reply.Close && time.Since(began) == 0, "got %+v after %v", reply, time.Since(began))
			check.Must(t, reply.Body.Close())
			synctest.Wait() // its place is free
		}
	})
}

func TestTracingOffAndAway(t *testing.T) {
	tracer, end, err := (Tracing{}).Start(t.Context())
	check.That(t, tracer == nil && err == nil && end(t.Context()) == nil, "off: %v, %v", tracer, err)
	// Nobody listens there: calls do not notice.
	tracer, end, err = Tracing{Endpoint: "127.0.0.1:1", Insecure: true, SampleRatio: 1, Log: zap.NewNop()}.Start(t.Context())
	check.Must(t, err)
	began := time.Now()
	_, span := tracer.Start(t.Context(), "call")
	span.End()
	took := time.Since(began)
	check.That(t, took <= 10*time.Second, "a span took %v", took)
	_ = end(check.Within(t, 100*time.Millisecond))
}

// brokenExporter cannot send.
type brokenExporter struct{ sdktrace.SpanExporter }

func (brokenExporter) ExportSpans(context.Context, []sdktrace.ReadOnlySpan) error {
	return errors.New("no collector")
}

func TestLostSpansAreLogged(t *testing.T) {
	core, logged := observer.New(zap.WarnLevel)
	exporter := &loggedExporter{SpanExporter: brokenExporter{}, log: zap.New(core)}
	check.NoError(t, exporter.ExportSpans(t.Context(), nil), "the failure went on to OpenTelemetry")
	check.That(t, logged.FilterMessageSnippet("spans are lost").Len() == 1, "the loss was not logged: %v", logged.All())
}
