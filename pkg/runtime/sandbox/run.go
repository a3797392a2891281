package sandbox

import (
	"context"
	"time"
)

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
