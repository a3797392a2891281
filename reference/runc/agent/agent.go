// Package agent answers about the volumes of all sandboxes of crust-runc on a
// socket, so that crust-proxy need not start a program for each question. It is a
// program of its own because crust-runc is started for each step of each container,
// and gRPC alone would double what that takes.
package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"google.golang.org/grpc"

	"github.com/crust-proxy/crust-proxy/internal/ground/peercred"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/reference/handler/serve"
	"github.com/crust-proxy/crust-proxy/reference/runc"
)

const (
	// idleCheck is how often the agent looks whether any sandbox is left, and
	// idleChecks how many such looks in a row end it.
	idleCheck  = 2 * time.Second
	idleChecks = 2
)

// Run serves until no sandbox is left, or a signal comes. Where an agent runs already
// it is a success at once. Nothing depends on it: it holds no mount and no state, so
// it may die at any time, and the next container with a volume starts another one.
func Run(cfg runc.Config) error {
	if err := os.MkdirAll(cfg.StateDir, 0o700); err != nil {
		return fmt.Errorf("the directory %s cannot be made: %w", cfg.StateDir, err)
	}
	listener, err := peercred.Listen(cfg.AgentSocket(), 0o600, "")
	if err != nil {
		if served, _ := sys.IsServed(cfg.AgentSocket()); served {
			return nil
		}
		return err
	}
	volumes := runc.OpenVolumes(cfg)
	served := serve.New(volumes)
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer cancel()
	go func() {
		waitIdle(ctx, volumes)
		served.GracefulStop()
	}()
	if err := served.Serve(listener); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
		return fmt.Errorf("%s cannot be served: %w", cfg.AgentSocket(), err)
	}
	return nil
}

// waitIdle waits until no sandbox has had a volume for a while, or ctx ends.
func waitIdle(ctx context.Context, volumes runc.Volumes) {
	for idle := 0; idle < idleChecks && sys.Sleep(ctx, idleCheck); {
		if idle++; volumes.Any() {
			idle = 0
		}
	}
}
