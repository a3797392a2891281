package telemetry

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/ground/peercred"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/check/rpctest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	checkMethod = "/grpc.health.v1.Health/Check"
	secret      = "hunter2"
)

// service answers as a test wants.
type service struct {
	healthv1.UnimplementedHealthServer
	answer func(ctx context.Context) error
}

func (s service) Check(ctx context.Context, _ *healthv1.HealthCheckRequest) (*healthv1.HealthCheckResponse, error) {
	return &healthv1.HealthCheckResponse{}, s.answer(ctx)
}

func (s service) Watch(_ *healthv1.HealthCheckRequest, stream grpc.ServerStreamingServer[healthv1.HealthCheckResponse]) error {
	return s.answer(stream.Context())
}

// watched is a real server under the interceptors, and all that they tell.
type watched struct {
	client  healthv1.HealthClient
	log     *bytes.Buffer
	metrics *Metrics
	spans   *tracetest.SpanRecorder
	stop    func()
}

func watch(t *testing.T, level string, answer func(ctx context.Context) error) *watched {
	t.Helper()
	w := &watched{log: &bytes.Buffer{}, metrics: NewMetrics("test"), spans: tracetest.NewSpanRecorder()}
	provider := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(w.spans))
	interceptors := &Interceptors{
		Log: NewLogger(w.log, zap.NewAtomicLevelAt(Level(level))), Metrics: w.metrics, Tracer: provider.Tracer("test"),
	}
	allowed := peercred.NewAuthorizer("", peercred.Policy{UIDs: []uint32{uint32(os.Getuid())}}, nil) //nolint:gosec // a uid
	server := grpc.NewServer(append(interceptors.Options(), allowed.ServerOptions()...)...)
	healthv1.RegisterHealthServer(server, service{answer: answer})
	path := filepath.Join(t.TempDir(), "test.sock")
	rpctest.Serve(t, path, server)
	conn := rpctest.Dial(t, path)
	w.client = healthv1.NewHealthClient(conn)
	w.stop = func() { _ = conn.Close(); server.GracefulStop() }
	t.Cleanup(w.stop)
	return w
}

// TestALongTargetIsClipped: a request may hold one of 256 KiB, which is refused and logged.
func TestALongTargetIsClipped(t *testing.T) {
	w := watch(t, "info", func(ctx context.Context) error {
		CallFrom(ctx).Target = "/" + strings.Repeat("x", 256<<10)
		return status.Error(codes.InvalidArgument, "too long")
	})
	_ = w.call(t.Context())
	lines := w.lines(t)
	check.That(t, len(lines) == 1 && len(w.log.Bytes()) <= 8<<10 && strings.HasPrefix(fmt.Sprint(lines[0][FieldTarget]), "/xxx"), "%d bytes are logged", len(w.log.Bytes()))
}

// call makes a call and waits until the server is done with it.
func (w *watched) call(ctx context.Context) error {
	_, err := w.client.Check(ctx, &healthv1.HealthCheckRequest{Service: secret})
	w.stop()
	return err
}

// lines are the log's lines.
func (w *watched) lines(t *testing.T) []map[string]any {
	t.Helper()
	var lines []map[string]any
	for _, raw := range bytes.Split(bytes.TrimSpace(w.log.Bytes()), []byte("\n")) {
		if len(raw) == 0 {
			continue
		}
		line := map[string]any{}
		err := json.Unmarshal(raw, &line)
		check.Require(t, err == nil, "%s: %v", raw, err)
		lines = append(lines, line)
	}
	return lines
}

// scrape writes the metrics of one family as "name{labels} value" lines.
func scrape(t *testing.T, m *Metrics, family string) []string {
	t.Helper()
	families := check.Value(m.Registry.Gather())(t)
	var out []string
	for _, f := range families {
		if f.GetName() != family {
			continue
		}
		for _, metric := range f.GetMetric() {
			labels := make([]string, 0, len(metric.GetLabel()))
			for _, l := range metric.GetLabel() {
				labels = append(labels, l.GetName()+"="+l.GetValue())
			}
			value := metric.GetCounter().GetValue() + metric.GetGauge().GetValue() + float64(metric.GetHistogram().GetSampleCount())
			out = append(out, fmt.Sprintf("%s %v", strings.Join(labels, ","), value))
		}
	}
	return out
}

func wantMetric(t *testing.T, m *Metrics, family string, want ...string) {
	t.Helper()
	got := scrape(t, m, family)
	check.That(t, strings.Join(got, "\n") == strings.Join(want, "\n"), "%s is\n%s\nwant\n%s", family, strings.Join(got, "\n"), strings.Join(want, "\n"))
}

// describe fills in a call as an API does.
func describe(ctx context.Context) {
	*CallFrom(ctx) = Call{Volume: "key", Target: "/target", Driver: "ebs.csi.aws.com", Handler: "kata", Sandbox: "sandbox"}
}

func TestACallIsLoggedCountedAndTraced(t *testing.T) {
	w := watch(t, "debug", func(ctx context.Context) error {
		describe(ctx)
		return status.Error(codes.NotFound, "no such volume")
	})
	const parent = "4bf92f3577b34da6a3ce929d0e0e4736"
	ctx := metadata.AppendToOutgoingContext(t.Context(), "traceparent", "00-"+parent+"-00f067aa0ba902b7-01")
	err := w.call(ctx)
	check.Require(t, status.Code(err) == codes.NotFound, "%v", err)
	line := w.lines(t)[0]
	for field, want := range map[string]any{
		"level": "warn", FieldMethod: checkMethod, FieldCode: "NotFound", FieldVolume: "key", FieldTarget: "/target",
		FieldDriver: "ebs.csi.aws.com", FieldHandler: "kata", FieldSandbox: "sandbox",
		FieldPeerUID: float64(os.Getuid()), FieldPeerPID: float64(os.Getpid()), "error": "no such volume",
	} {
		check.That(t, line[field] == want, "the log's %s is %v, want %v", field, line[field], want)
	}
	took, ok := line[FieldDuration].(float64)
	check.That(t, ok && took > 0 && took <= 5, "the duration is %v", line[FieldDuration])
	wantMetric(t, w.metrics, "crust_proxy_calls_total",
		"code=NotFound,driver=ebs.csi.aws.com,handler=kata,method=Check,service=grpc.health.v1.Health 1")
	wantMetric(t, w.metrics, "crust_proxy_call_duration_seconds",
		"driver=ebs.csi.aws.com,handler=kata,method=Check,service=grpc.health.v1.Health 1")
	span := w.spans.Ended()[0]
	check.Equal(t, span.SpanContext().TraceID().String(), parent, "the trace")
	check.Equal(t, span.Name(), "grpc.health.v1.Health/Check", "the span")
	for _, attribute := range span.Attributes() {
		check.That(t, !strings.Contains(attribute.Value.String(), "/target"), "the span tells the path: %v", attribute)
	}
}

func TestRequestsAreNeverLogged(t *testing.T) {
	for name, answer := range map[string]func(context.Context) error{
		"success": func(context.Context) error { return nil },
		"failure": func(context.Context) error { return status.Error(codes.Internal, "broken") },
		"panic":   func(context.Context) error { panic("about " + secret) },
	} {
		w := watch(t, "debug", answer)
		err := w.call(metadata.AppendToOutgoingContext(t.Context(), "authorization", secret))
		check.That(t, !strings.Contains(w.log.String(), secret) && (err == nil || !strings.Contains(err.Error(), secret)),
			"%s: the request was told: %s, %v", name, w.log, err)
		check.That(t, w.log.Len() != 0, "%s: nothing was logged at all", name)
		for _, span := range w.spans.Ended() {
			check.That(t, !strings.Contains(fmt.Sprint(span.Attributes(), span.Events(), span.Status()), secret), "%s: the request is in the span", name)
		}
	}
}

func TestLevels(t *testing.T) {
	for method, read := range map[string]bool{
		"/csi.v1.Node/NodeGetVolumeStats": true, "/csi.v1.Identity/Probe": true, "/crust.runtime.v1.Runtime/RuntimeGetVolumeStats": true,
		"/csi.v1.Node/NodePublishVolume": false, "/crust.admin.v1.Admin/ReleaseVolume": false, checkMethod: true,
		"/crust.admin.v1.Admin/WatchVolumes": true, "/crust.runtime.v1.Runtime/RuntimeStageVolume": false,
	} {
		core, logged := observer.New(zap.DebugLevel)
		i := &Interceptors{Log: zap.New(core), Metrics: NewMetrics("test")}
		_, err := i.unary(t.Context(), nil, &grpc.UnaryServerInfo{FullMethod: method}, func(context.Context, any) (any, error) { return nil, nil })
		lines := logged.All()
		check.That(t, err == nil && len(lines) == 1 && (lines[0].Level == zap.DebugLevel) == read, "%s: %v, %v", method, lines, err)
	}
	stream := watch(t, "debug", func(context.Context) error { return nil })
	events, err := stream.client.Watch(t.Context(), &healthv1.HealthCheckRequest{Service: secret})
	if err == nil {
		_, _ = events.Recv()
	}
	stream.stop()
	lines := stream.lines(t)
	check.That(t, len(lines) == 1 && lines[0][FieldMethod] == "/grpc.health.v1.Health/Watch", "got %v", lines)
	wantMetric(t, stream.metrics, "crust_proxy_calls_total", "code=OK,driver=unknown,handler=,method=Watch,service=grpc.health.v1.Health 1")
}

func TestAPanicEndsItsCallAlone(t *testing.T) {
	w := watch(t, "info", func(context.Context) error { panic("at the disco") })
	stream, err := w.client.Watch(t.Context(), &healthv1.HealthCheckRequest{})
	if err == nil {
		_, err = stream.Recv()
	}
	check.That(t, status.Code(err) == codes.Internal, "the stream got %v", err)
	err = w.call(t.Context())
	check.That(t, status.Code(err) == codes.Internal && !strings.Contains(err.Error(), "goroutine"), "got %v", err)
	check.That(t, strings.Contains(w.log.String(), "TestAPanicEndsItsCallAlone"), "the stack is not in the log")
}

func TestContextErrorsHaveTheirCode(t *testing.T) {
	for want, err := range map[codes.Code]error{
		codes.Canceled: context.Canceled, codes.DeadlineExceeded: context.DeadlineExceeded, codes.Unknown: errors.New("other"),
		codes.Aborted: status.Error(codes.Aborted, "aborted"), codes.OK: nil,
	} {
		got, _ := (&Interceptors{}).outcome(checkMethod, &Call{}, err)
		check.That(t, got == want, "%v: got %v, want %v", err, got, want)
	}
}

func TestDriversAreBounded(t *testing.T) {
	m := NewMetrics("test")
	for i := range 1000 {
		m.called(checkMethod, &Call{Driver: fmt.Sprint("driver-", i)}, codes.OK, false, 0)
		m.Published(fmt.Sprint("driver-", i), "kata")
	}
	for _, bad := range []string{"\xff\xfe", strings.Repeat("x", 4096)} {
		m.called(checkMethod, &Call{Driver: bad}, codes.OK, false, 0)
	}
	for _, family := range []string{"crust_proxy_calls_total", "volumes_published_with_deferred_ops_total"} {
		got := len(scrape(t, m, family))
		check.That(t, got == maxDrivers+1, "%s has %d children", family, got)
	}
}

// A driver can answer with any number.
func TestCodesAreBounded(t *testing.T) {
	m := NewMetrics("test")
	for code := range codes.Code(100) {
		m.called(checkMethod, &Call{}, code, false, 0)
	}
	got := len(scrape(t, m, "crust_proxy_calls_total"))
	check.That(t, got == int(codes.Unauthenticated)+1, "%d children", got)
}

func TestMetrics(t *testing.T) {
	m := NewMetrics("1.2.3")
	m.ClaimRefused("in-use")
	m.CallerDenied()
	m.Repaired("retract", true)
	m.Repaired("retract", false)
	m.Published("ebs", "kata")
	m.SandboxAsked("kata", "stats", "timeout", time.Second)
	m.PodLookedUp("pod", "ok", time.Second)
	wantMetric(t, m, "crust_proxy_claims_refused_total", "reason=in-use 1")
	wantMetric(t, m, "crust_proxy_callers_denied_total", " 1")
	wantMetric(t, m, "crust_proxy_reconcile_repairs_total", "action=retract,result=failed 1", "action=retract,result=ok 1")
	wantMetric(t, m, "volumes_published_with_deferred_ops_total", "driver=ebs,handler=kata 1")
	wantMetric(t, m, "crust_proxy_sandbox_call_duration_seconds", "call=stats,handler=kata,result=timeout 1")
	wantMetric(t, m, "crust_proxy_build_info", "version=1.2.3 1")
	wantMetric(t, m, "crust_proxy_pod_lookup_duration_seconds", "question=pod,result=ok 1")
	check.That(t, len(scrape(t, m, "go_goroutines")) != 0 && len(scrape(t, m, "process_open_fds")) != 0, "the process's own metrics are missing")
	check.That(t, !prometheus.DefaultRegisterer.Unregister(m.calls), "the global registry is used")
}

// TestExpectedErrorsAreQuiet: kubelet asks some things over and over, and counts on the refusal.
func TestExpectedErrorsAreQuiet(t *testing.T) {
	for expected, want := range map[bool]string{true: "debug", false: "warn"} {
		w := watch(t, "debug", func(ctx context.Context) error {
			CallFrom(ctx).Expected = expected
			return status.Error(codes.Unimplemented, "no numbers")
		})
		err := w.call(t.Context())
		check.That(t, status.Code(err) == codes.Unimplemented, "the caller got %v", err)
		lines := w.lines(t)
		check.That(t, len(lines) == 1 && lines[0]["level"] == want, "expected %v: %v", expected, lines)
	}
}
