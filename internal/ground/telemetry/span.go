package telemetry

import (
	"context"
	"strings"

	"go.opentelemetry.io/otel/attribute"
	otelcodes "go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
)

// finish ends a span, with the volume and the code. The error's text, like all other text, stays in the
// node's own log: otelgrpc would put it into the span, a driver's words with its secrets too.
func finish(span trace.Span, call *Call, code codes.Code) {
	span.SetAttributes(
		attribute.String("rpc.system", "grpc"), attribute.String("rpc.grpc.status", code.String()),
		attribute.String("crust.volume", call.Volume), attribute.String("crust.driver", call.Driver),
		attribute.String("crust.handler", call.Handler), attribute.String("crust.sandbox", call.Sandbox))
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
