package observe

import (
	"context"
	"fmt"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

// Tracing is where spans go.
type Tracing struct {
	Endpoint    string
	Insecure    bool
	SampleRatio float64
	Version     string
}

// Start makes a tracer, and the way to end it. Without an endpoint there is
// none: nil. Spans are sent in the background; a collector that is away costs
// spans, never a call.
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
		sdktrace.WithBatcher(exporter),
		sdktrace.WithSampler(sdktrace.ParentBased(sdktrace.TraceIDRatioBased(t.SampleRatio))),
		sdktrace.WithResource(resource.NewSchemaless(
			attribute.String("service.name", "crust-proxy"), attribute.String("service.version", t.Version))),
	)
	return provider.Tracer("crust-proxy"), provider.Shutdown, nil
}
