package run

import (
	"context"
	"errors"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
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
	if !errors.Is(err, broken) || err.Error() != "fails: broken" {
		t.Fatalf("got %v", err)
	}
	if !errors.Is(cause, broken) {
		t.Fatalf("cause is %v", cause)
	}
}

func TestGroupEndOfParentIsNoError(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	g := New(ctx)
	g.Go("a", func(ctx context.Context) error { cancel(); <-ctx.Done(); return nil })
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
}

func TestUntilSignal(t *testing.T) {
	ctx, stop := UntilSignal(t.Context())
	defer stop()
	if err := syscall.Kill(syscall.Getpid(), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	select {
	case <-ctx.Done():
	case <-time.After(5 * time.Second):
		t.Fatal("the signal did not end the context")
	}
	if cause := context.Cause(ctx); !strings.Contains(cause.Error(), syscall.SIGTERM.String()) {
		t.Fatalf("cause is %v", cause)
	}
}
