package systemd

import (
	"context"
	"time"

	"go.uber.org/zap"
)

// Watchdog notifies the service manager at twice the required rate while the daemon is
// alive. Without these notifications the manager restarts the daemon.
type Watchdog struct {
	Notifier *Notifier
	// Alive returns why the daemon is not alive, or nil. It must end with its context.
	Alive func(ctx context.Context) error
	Log   *zap.Logger
}

// Run notifies until ctx ends. Without a watchdog it only waits.
func (w *Watchdog) Run(ctx context.Context) error {
	interval := w.Notifier.watchdog / 2
	if interval <= 0 {
		<-ctx.Done()
		return nil
	}
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		w.notify(ctx, interval)
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

func (w *Watchdog) notify(ctx context.Context, limit time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	if err := w.Alive(ctx); err != nil {
		if ctx.Err() == nil || context.Cause(ctx) == context.DeadlineExceeded { //nolint:errorlint // the limit itself, not the end of the daemon
			w.Log.Error("not alive: systemd gets no notification and will restart the daemon", zap.Error(err))
		}
		return
	}
	if err := w.Notifier.send("WATCHDOG=1", nil); err != nil {
		w.Log.Error("the watchdog cannot be notified", zap.Error(err))
	}
}
