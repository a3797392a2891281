package daemon

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestOneDaemonHasARunDirectory until it ends.
func TestOneDaemonHasARunDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	first, err := alone(t.Context(), dir, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := alone(t.Context(), dir, 0); err == nil || !strings.Contains(err.Error(), dir) || !strings.Contains(err.Error(), "another") {
		t.Errorf("a second daemon was told %v", err)
	}
	given := make(chan error, 1)
	go func() {
		second, err := alone(t.Context(), dir, time.Minute)
		if err == nil {
			second()
		}
		given <- err
	}()
	first()
	if err := <-given; err != nil {
		t.Errorf("a daemon that waited was told %v", err)
	}
}

func TestWaitingForTheRunDirectoryEnds(t *testing.T) {
	dir := t.TempDir()
	first, err := alone(t.Context(), dir, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer first()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := alone(ctx, dir, time.Minute); !errors.Is(err, context.Canceled) {
		t.Errorf("a daemon that is stopped while it waits ends with %v", err)
	}
}
