// Package step shows in a call's trace which of its steps took the time.
package step

import (
	"context"

	"go.opentelemetry.io/otel/trace"
)

// Begin begins a step of the call that ctx belongs to. The function that it returns ends the step. Where the
// call is not traced nothing happens.
func Begin(ctx context.Context, name string) (context.Context, func()) {
	call := trace.SpanFromContext(ctx)
	if !call.IsRecording() {
		return ctx, func() {}
	}
	ctx, span := call.TracerProvider().Tracer("crust-proxy").Start(ctx, name)
	return ctx, func() { span.End() }
}
