package sys

import (
	"context"
	"time"
)

// Sleep waits, but not longer than ctx lives. It tells whether the time is over.
func Sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
