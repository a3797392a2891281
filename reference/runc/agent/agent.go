// Package agent answers about the volumes of all sandboxes of crust-runc on a
// socket, so that crust-proxy need not start a program for each question. It is a
// program of its own because crust-runc is started for each step of each container,
// and gRPC alone would double what that takes.
package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/crust-proxy/crust-proxy/reference/handler/serve"
	"github.com/crust-proxy/crust-proxy/reference/runc"
)

const (
	agentLock = "agent.lock"
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
	lock, err := lockAgent(cfg)
	if err != nil || lock == nil {
		return err
	}
	defer func() { _ = lock.Close() }()
	listener, err := listen(cfg.AgentSocket())
	if err != nil {
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

// lockAgent gives nil where another agent has the lock.
func lockAgent(cfg runc.Config) (*os.File, error) {
	lock, err := os.OpenFile(filepath.Join(cfg.StateDir, agentLock), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("the agent's lock cannot be opened: %w", err)
	}
	err = unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, lock.Close()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("the agent's lock cannot be taken: %w", err), lock.Close())
	}
	return lock, nil
}

// listen takes the place of an agent that died. The caller has the lock. The
// socket lies in a directory that is root's alone.
func listen(socket string) (net.Listener, error) {
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return nil, fmt.Errorf("%s cannot be listened on: %w", socket, err)
	}
	return listener, os.Chmod(socket, 0o600)
}

// waitIdle waits until no sandbox has had a volume for a while, or ctx ends.
func waitIdle(ctx context.Context, volumes runc.Volumes) {
	tick := time.NewTicker(idleCheck)
	defer tick.Stop()
	for idle := 0; idle < idleChecks; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if idle++; volumes.Any() {
			idle = 0
		}
	}
}
