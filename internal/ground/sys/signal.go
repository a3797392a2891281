package sys

import (
	"context"
	"os/signal"
	"syscall"
)

// UntilInterrupted returns a context for a program that removes what it has made: an interrupt, SIGTERM or the end of
// its terminal ends the context. A second interrupt kills the program. A second hangup does not, because both the
// kernel and a shell send one; and with nohup, none ends the context.
func UntilInterrupted() (context.Context, context.CancelFunc) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	if signal.Ignored(syscall.SIGHUP) {
		return ctx, stop
	}
	hung, stopHung := signal.NotifyContext(ctx, syscall.SIGHUP)
	return hung, func() { stopHung(); stop() }
}

// Wake leaves one message in a channel that has room for one. It never blocks.
func Wake(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default: // it is pending already
	}
}
