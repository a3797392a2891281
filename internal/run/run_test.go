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
	var g Group
	g.Add("waits", func(ctx context.Context) error {
		<-ctx.Done()
		cause = context.Cause(ctx)
		return ctx.Err()
	})
	g.Add("passes on", func(ctx context.Context) error {
		<-ctx.Done()
		return context.Cause(ctx)
	})
	g.Add("done", func(context.Context) error { return nil })
	g.Add("fails", func(context.Context) error { return broken })
	err := g.Run(t.Context())
	if !errors.Is(err, broken) || err.Error() != "fails: broken" {
		t.Fatalf("got %v", err)
	}
	if !errors.Is(cause, broken) {
		t.Fatalf("cause is %v", cause)
	}
}

func TestGroupJoinsErrorsOfTheWayDown(t *testing.T) {
	var g Group
	g.Add("a", func(context.Context) error { return errors.New("first") })
	g.Add("b", func(ctx context.Context) error {
		<-ctx.Done()
		return errors.New("cannot close")
	})
	err := g.Run(t.Context())
	for _, want := range []string{"a: first", "b: cannot close"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Fatalf("%q is not in %v", want, err)
		}
	}
}

func TestGroupEndOfParentIsNoError(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var g Group
	g.Add("a", func(ctx context.Context) error { cancel(); <-ctx.Done(); return ctx.Err() })
	if err := g.Run(ctx); err != nil {
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
	var by SignalError
	if !errors.As(context.Cause(ctx), &by) || by.Signal != syscall.SIGTERM {
		t.Fatalf("cause is %v", context.Cause(ctx))
	}
}
