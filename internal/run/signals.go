package run

import (
	"context"
	"os/signal"
	"syscall"
)

// UntilSignal makes a context that SIGTERM or SIGINT ends, with the signal as its cause.
// The second such signal kills the process as if nobody listened: who sends it does not
// want to wait. Call it before a slow start-up.
func UntilSignal(parent context.Context) (ctx context.Context, stop func()) {
	ctx, stop = signal.NotifyContext(parent, syscall.SIGTERM, syscall.SIGINT)
	context.AfterFunc(ctx, stop)
	return ctx, stop
}
