package run

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

// SignalError is the cause of a context that a signal ended.
type SignalError struct{ Signal os.Signal }

// Error names the signal.
func (e SignalError) Error() string { return fmt.Sprintf("asked to stop by %v", e.Signal) }

// UntilSignal makes a context that SIGTERM or SIGINT ends, with a SignalError as
// its cause. The second such signal kills the process as if nobody listened:
// who sends it does not want to wait. Call it before a slow start-up.
func UntilSignal(parent context.Context) (ctx context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(parent)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	go func() {
		defer signal.Stop(signals)
		select {
		case s := <-signals:
			cancel(SignalError{Signal: s})
		case <-ctx.Done():
		}
	}()
	return ctx, func() { cancel(nil) }
}
