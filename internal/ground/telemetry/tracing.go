package telemetry

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"go.opentelemetry.io/otel/attribute"
	otelcodes "go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// Tracing is where spans go.
type Tracing struct {
	Endpoint    string
	Insecure    bool
	SampleRatio float64
	Version     string
	// Log gets a line when spans could not be sent.
	Log *zap.Logger
}

// Start returns a tracer and the function that ends it. Without an endpoint the tracer is nil. Spans are sent in the
// background: while the collector is away, spans are lost, and no call waits.
func (t Tracing) Start(ctx context.Context) (trace.Tracer, func(context.Context) error, error) {
	if t.Endpoint == "" {
		return nil, func(context.Context) error { return nil }, nil
	}
	options := []otlptracegrpc.Option{otlptracegrpc.WithEndpoint(t.Endpoint)}
	if t.Insecure {
		options = append(options, otlptracegrpc.WithInsecure())
	}
	exporter, err := otlptracegrpc.New(ctx, options...)
	if err != nil {
		return nil, nil, fmt.Errorf("tracing to %s: %w", t.Endpoint, err)
	}
	provider := sdktrace.NewTracerProvider(
		sdktrace.WithBatcher(&loggedExporter{SpanExporter: exporter, log: t.Log}),
		sdktrace.WithSampler(sdktrace.ParentBased(sdktrace.TraceIDRatioBased(t.SampleRatio))),
		sdktrace.WithResource(resource.NewSchemaless(
			attribute.String("service.name", "crust-proxy"), attribute.String("service.version", t.Version))),
	)
	end := func(ctx context.Context) error {
		// The provider alone does not end an exporter that waits for its collector.
		return errors.Join(provider.Shutdown(ctx), exporter.Shutdown(ctx))
	}
	return provider.Tracer("crust-proxy"), end, nil
}

// loggedExporter logs failures. OpenTelemetry itself would pass them to a global handler,
// which writes plain text between the lines of JSON.
type loggedExporter struct {
	sdktrace.SpanExporter
	log    *zap.Logger
	failed int64 // how often in a row; it is called by one goroutine
}

// ExportSpans sends spans, or logs that it could not, rarely while that lasts.
func (e *loggedExporter) ExportSpans(ctx context.Context, spans []sdktrace.ReadOnlySpan) error {
	err := e.SpanExporter.ExportSpans(ctx, spans)
	if e.failed++; err == nil {
		e.failed = 0
	} else if sys.Rarely(e.failed) {
		e.log.Warn("spans are lost: the collector did not take them", zap.Int("spans", len(spans)), zap.Error(err))
	}
	return nil
}

// finish ends a span, with the volume and the code. The error's text, like all other text, stays in the
// node's own log: otelgrpc would put it into the span, a driver's words with its secrets too.
func finish(span trace.Span, call *Call, code codes.Code) {
	span.SetAttributes(
		attribute.String("rpc.system", "grpc"), attribute.String("rpc.grpc.status", code.String()),
		attribute.String("crust.volume", call.Volume), attribute.String("crust.csi_volume_id", sys.ClipTo(call.CSIVolume, maxName)),
		attribute.String("crust.driver", call.Driver), attribute.String("crust.handler", call.Handler),
		attribute.String("crust.pod", sys.ClipTo(call.Pod, 2*maxName)), attribute.String("crust.rule", call.Rule),
		attribute.String("crust.sandbox", call.Sandbox))
	if code != codes.OK {
		span.SetStatus(otelcodes.Error, code.String())
	}
	span.End()
}

// withParent uses the caller's span, if it sent one, as the parent.
func withParent(ctx context.Context) context.Context {
	header, _ := metadata.FromIncomingContext(ctx)
	carrier := propagation.MapCarrier{}
	for _, key := range (propagation.TraceContext{}).Fields() {
		carrier.Set(key, strings.Join(header.Get(key), ","))
	}
	return propagation.TraceContext{}.Extract(ctx, carrier)
}
