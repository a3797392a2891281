package crust

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/guest"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

const (
	// sweepTime bounds one run of a program that thaws what has expired, sweepRetry is the time after which one that
	// failed is run again, and sweepGap the least time between two runs.
	sweepTime  = time.Minute
	sweepRetry = 30 * time.Second
	sweepGap   = time.Second
	// sweepLate is how long after the end of a freeze the programs are run: the handler's own watchdogs come first.
	sweepLate = 5 * time.Second
	// mostHung is how many runs of a program may hang: one volume that hangs must not keep the others frozen.
	mostHung = 16
)

// expiry runs each program to thaw volumes that are still frozen after their time, because whatever would have thawed
// them was killed. It does so at the start and after the end of each freeze.
type expiry struct {
	programs []string
	owner    uint32
	log      *zap.Logger
	late     time.Duration
	ends     chan time.Time
	runs     *runner
}

func newExpiry(cfg Config, log *zap.Logger) *expiry {
	return &expiry{programs: cfg.Programs, owner: cfg.Owner, log: log, late: sweepLate, ends: make(chan time.Time, 64), runs: newRunner(mostHung)}
}

// frozen records a freeze. It does not block: if the queue is full, run sweeps soon anyway.
func (e *expiry) frozen(timeout time.Duration) {
	select {
	case e.ends <- time.Now().Add(timeout + e.late):
	default:
	}
}

func (e *expiry) run(ctx context.Context) {
	next := time.Now()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case end := <-e.ends:
			if next.IsZero() || end.Before(next) {
				next = end
			}
		case <-timer.C:
			next = e.sweep(ctx)
		}
		timer.Stop()
		if !next.IsZero() {
			timer.Reset(max(time.Until(next), 0))
		}
	}
}

// sweep runs every program. If nothing is frozen, next is the zero time.
func (e *expiry) sweep(ctx context.Context) (next time.Time) {
	for _, program := range e.programs {
		reply, err := e.ask(ctx, program)
		if ctx.Err() != nil {
			return time.Time{}
		}
		again := time.Duration(min(reply.NextSeconds, 3600)) * time.Second
		if err != nil {
			e.log.Warn("volumes that are frozen for too long cannot be thawed", zap.String("program", program), zap.Error(err))
			again = sweepRetry
		}
		for _, volume := range reply.Thawed {
			e.log.Warn("a volume was frozen although its time was over, and has been thawed", zap.String("program", program),
				zap.String("key", guest.Printable(volume, guest.MaxErrorText)))
		}
		if again > 0 {
			at := time.Now().Add(max(again, sweepGap))
			if next.IsZero() || at.Before(next) {
				next = at
			}
		}
	}
	return next
}

// ask runs one program. One without thaw-expired has nothing to thaw.
func (e *expiry) ask(ctx context.Context, program string) (reply abi.ThawExpiredReply, err error) {
	ctx, cancel := context.WithTimeout(ctx, sweepTime)
	defer cancel()
	file, err := openProgram(program, e.owner)
	if volume.KindOf(err) == volume.Unsupported && err != nil {
		return reply, nil // it is not installed: Health reports it
	}
	if err != nil {
		return reply, err
	}
	ended, err := e.runs.run(ctx, program, file, program, []string{abi.ThawExpired})
	switch {
	case err != nil:
		return reply, err
	case ended.Code == abi.ExitUsage || ended.Code == abi.ExitUnsupported:
		return reply, nil
	case ended.Full:
		return reply, fmt.Errorf("it wrote more than the %d bytes that an answer may have", maxAnswer)
	case ended.Code != abi.ExitOK:
		text := guest.Printable(oneLine(ended.Stderr), guest.MaxErrorText)
		return reply, errors.New(cmp.Or(text, fmt.Sprintf("it ended with status %d and no reason", ended.Code)))
	}
	if err := json.Unmarshal([]byte(ended.Stdout), &reply); err != nil {
		return abi.ThawExpiredReply{}, fmt.Errorf("its answer cannot be read: %w", err)
	}
	if reply.Problem != "" {
		err = errors.New(guest.Printable(oneLine(reply.Problem), guest.MaxErrorText))
	}
	return reply, err
}
