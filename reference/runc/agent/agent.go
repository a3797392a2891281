// Package agent serves the volumes of all sandboxes of crust-runc on a socket, so that crust-proxy need not start a
// program for each call. It is a separate program because crust-runc is started for each step of each container, and
// linking gRPC alone would double its start time.
package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/crust-proxy/crust-proxy/internal/ground/peercred"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/reference/handler"
	"github.com/crust-proxy/crust-proxy/reference/handler/serve"
	"github.com/crust-proxy/crust-proxy/reference/process"
	"github.com/crust-proxy/crust-proxy/reference/runc"
)

const (
	// idleCheck is how often the agent checks whether a sandbox is left. After idleChecks
	// checks in a row without one it ends.
	idleCheck  = 2 * time.Second
	idleChecks = 2
)

// Run serves until no sandbox is left, or until a signal. If another agent is running, it returns nil at once. The
// agent has no mounts and no state, so it may die at any time: the next container with a volume starts another one.
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
		for idle := 0; idle < idleChecks && sys.Sleep(ctx, idleCheck); {
			if idle++; volumes.Any() {
				idle = 0
			}
		}
		served.GracefulStop()
	}()
	if err := served.Serve(listener); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
		return fmt.Errorf("%s cannot be served: %w", cfg.AgentSocket(), err)
	}
	return nil
}

const usage = `crust-runc-agent answers on a socket what ` + "`crust-runc crust`" + ` answers as a program.
crust-runc starts it with the first container that has a deferred volume; it ends a
few seconds after the last sandbox. It takes no arguments.
`

// Main runs the agent and returns its exit status.
func Main(args []string, stdout, stderr io.Writer) int {
	if len(args) > 1 && args[1] == abi.Word {
		// It was started as a watchdog of a freeze.
		return runc.Main(args, stdout, stderr)
	}
	if len(args) == 2 && (args[1] == "--help" || args[1] == "-h") {
		_, _ = io.WriteString(stdout, usage)
		return abi.ExitOK
	}
	if len(args) == 2 && args[1] == "--version" {
		sys.PrintVersion(stdout, "crust-runc-agent")
		return abi.ExitOK
	}
	if len(args) > 1 {
		_, _ = io.WriteString(stderr, usage)
		return abi.ExitUsage
	}
	process.CloseInherited(unix.Stderr)
	// A call is a chain of goroutines that wait for each other, which is fastest on one processor.
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(1)
	}
	cfg, err := runc.LoadConfig(os.Getenv)
	if err = handler.Tolerate(err); err == nil {
		err = Run(cfg)
	}
	if err != nil {
		_, _ = fmt.Fprintln(stderr, "crust-runc-agent:", err)
		return abi.ExitRefused
	}
	return abi.ExitOK
}
