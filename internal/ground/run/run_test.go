package run

import (
	"context"
	"errors"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestGroupFirstErrorStopsAll(t *testing.T) {
	broken := errors.New("broken")
	var cause error
	g := New(t.Context())
	g.Go("waits", func(ctx context.Context) error {
		<-ctx.Done()
		cause = context.Cause(ctx)
		return nil
	})
	g.Go("done", func(context.Context) error { return nil })
	g.Go("fails", func(context.Context) error { return broken })
	err := g.Wait()
	check.Require(t, errors.Is(err, broken) && err.Error() == "fails: broken", "got %v", err)
	check.Require(t, errors.Is(cause, broken), "cause is %v", cause)
}

func TestGroupEndOfParentIsNoError(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	g := New(ctx)
	g.Go("a", func(ctx context.Context) error { cancel(); <-ctx.Done(); return nil })
	check.Must(t, g.Wait())
}

func TestUntilSignal(t *testing.T) {
	ctx, stop := UntilSignal(t.Context())
	defer stop()
	check.Must(t, syscall.Kill(syscall.Getpid(), syscall.SIGTERM))
	select {
	case <-ctx.Done():
	case <-time.After(5 * time.Second):
		t.Fatal("the signal did not end the context")
	}
	cause := context.Cause(ctx)
	check.Require(t, strings.Contains(cause.Error(), syscall.SIGTERM.String()), "cause is %v", cause)
}
