package sandbox

import (
	"context"
	"math/rand/v2"
	"time"

	"go.uber.org/zap"
)

const (
	firstPause = 100 * time.Millisecond
	lastPause  = 15 * time.Second
)

// run follows the container runtime until ctx ends, over its restarts and
// absences.
func (l *Live) run(ctx context.Context, follow func(context.Context) error) error {
	pause := firstPause
	for ctx.Err() == nil {
		start := time.Now()
		err := follow(ctx)
		isNew := l.lost(err)
		if ctx.Err() != nil {
			return nil
		}
		if time.Since(start) > lastPause {
			pause = firstPause
		}
		if isNew {
			l.log.Warn("the container runtime cannot be followed; trying again", zap.String("runtime", l.party), zap.Error(err))
		}
		// Jitter, so that many daemons do not come back to one node at once.
		sleep(ctx, pause/2+rand.N(pause/2)) //nolint:gosec // no secret hangs on it
		pause = min(2*pause, lastPause)
	}
	return nil
}

// sleep waits, but not longer than ctx lives.
func sleep(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}

// clip shortens what others wrote, for the log.
func clip(s string) string {
	const most = 128
	if len(s) > most {
		return s[:most]
	}
	return s
}
