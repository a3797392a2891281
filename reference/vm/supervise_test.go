package vm

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/crust-proxy/crust-proxy/reference/vm/wire"
)

// slow is a guest that answers every nth ping.
type slow struct {
	wire.SandboxService
	pings, nth int
}

func (s *slow) Ping(ctx context.Context, _ *wire.PingRequest) (*wire.PingResponse, error) {
	if s.pings++; s.pings%s.nth == 0 {
		return new(wire.PingResponse), nil
	}
	<-ctx.Done()
	return nil, ctx.Err()
}

// TestHangTimeout: a guest hangs when it has not answered for so long, and one that is slow
// does not.
func TestHangTimeout(t *testing.T) {
	const timeout = 90
	for nth, hangs := range map[int]bool{1: false, 3: false, 4: true, 1 << 30: true} {
		synctest.Test(t, func(t *testing.T) {
			s := &sandbox{cfg: Config{HangTimeoutSeconds: timeout}, guest: &wire.Client{SandboxService: &slow{nth: nth}}}
			ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
			defer cancel()
			began := time.Now()
			err := s.pings(ctx)
			if took := time.Since(began); errors.Is(err, errHangs) != hangs || hangs && took != timeout*time.Second {
				t.Errorf("one of %d pings answered: %v after %v", nth, err, took)
			}
		})
	}
}
