package run

import (
	"context"
	"os/signal"
	"syscall"
)

// UntilSignal returns a context that SIGTERM or SIGINT ends, with the signal as its cause.
// A second signal kills the process at once. Call it before a slow start.
func UntilSignal(parent context.Context) (ctx context.Context, stop func()) {
	ctx, stop = signal.NotifyContext(parent, syscall.SIGTERM, syscall.SIGINT)
	context.AfterFunc(ctx, stop)
	return ctx, stop
}
