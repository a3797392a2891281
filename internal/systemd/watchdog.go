package systemd

import (
	"context"
	"time"

	"go.uber.org/zap"
)

// Watchdog tells the service manager, at twice the rate that it asks for, that
// the daemon is alive; and nothing when it is not, so that it is restarted.
type Watchdog struct {
	Notifier *Notifier
	// Alive tells what is wrong, or nil. It must not block for long: not to
	// answer is not to be alive.
	Alive func(ctx context.Context) error
	Log   *zap.Logger
}

// Run works until ctx ends. Without a watchdog it only waits.
func (w *Watchdog) Run(ctx context.Context) error {
	interval := w.Notifier.watchdog / 2
	if interval <= 0 {
		<-ctx.Done()
		return nil
	}
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		w.tell(ctx, interval)
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

func (w *Watchdog) tell(ctx context.Context, limit time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	if err := w.Alive(ctx); err != nil {
		if ctx.Err() == nil || context.Cause(ctx) == context.DeadlineExceeded { //nolint:errorlint // the limit itself, not the end of the daemon
			w.Log.Error("not alive: systemd is not told otherwise and will restart the daemon", zap.Error(err))
		}
		return
	}
	if err := w.Notifier.send("WATCHDOG=1", nil); err != nil {
		w.Log.Error("the watchdog cannot be told", zap.Error(err))
	}
}
