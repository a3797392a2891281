// Command bench measures crust-proxy against what it must be compared with, side
// by side in one run, and writes the ratios to docs/performance.md. It needs
// root, and works in a mount namespace of its own.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/crust-proxy/crust-proxy/test/rig"
)

// The bench starts itself again in these roles.
const (
	roleEmpty  = "empty"
	roleShims  = "shims"
	roleDriver = "driver"
	roleNode   = "node"
	roleSpin   = "spin"
	roleFiles  = "files"
)

var roles = map[string]func(args []string) error{
	roleEmpty:  func(args []string) error { return serveEmpty(args[0]) },
	roleShims:  serveShims,
	roleFiles:  holdFiles,
	roleDriver: func(args []string) error { return serveDriver(args[0], args[1], args[2]) },
	roleNode:   func(args []string) error { return serveNode(args[0], args[1]) },
	roleSpin:   func(args []string) error { return spin(args[0]) },
}

const (
	// page is what the bench writes.
	page = "docs/performance.md"
	// inVMs is the figure with a table of its own: it may be of another machine.
	inVMs = "vm"
)

func main() {
	if len(os.Args) > 1 {
		if role, ok := roles[os.Args[1]]; ok {
			os.Exit(report(role(os.Args[2:])))
		}
	}
	var s settings
	flag.BoolVar(&s.quick, "quick", false, "a tenth of the rounds; writes no file")
	flag.StringVar(&s.only, "only", "", "one figure: latency, looks, nodecalls, hung, passthrough, pods, kube, cluster, scale, growth, snapshots, size, or vm, which has a table of its own")
	flag.Parse()
	os.Exit(rig.Run(func() int { return report(measure(s)) }, 0))
}

func report(err error) int {
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		return 1
	}
	return 0
}

// settings are the flags.
type settings struct {
	quick bool
	only  string
}

// scale is how many rounds of n are made.
func (s settings) scale(n int) int {
	if s.quick {
		return max(1, n/10)
	}
	return n
}

// measure takes all figures, or one. Each has a daemon of its own.
func measure(s settings) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	figures := &sheet{}
	for _, part := range []struct {
		name string
		take func(*testbed)
	}{
		{"latency", latency}, {"looks", looks}, {"nodecalls", nodeCalls}, {"hung", hungSandboxes}, {"passthrough", passthrough},
		{"pods", pods}, {"kube", kubePods}, {"cluster", inCluster}, {"scale", scale}, {"growth", growth}, {"snapshots", snapshots}, {"size", size},
		{inVMs, vms},
	} {
		if s.only != part.name && (s.only != "" || part.name == inVMs) {
			continue
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := rig.Do(ctx, func(t rig.T) { part.take(newTestbed(t, s, figures)) }); err != nil {
			return fmt.Errorf("%s: %w", part.name, err)
		}
	}
	switch {
	case s.quick:
		return nil
	case s.only == "":
		return figures.write(page, "make bench")
	case s.only == inVMs:
		return figures.write(page, "make bench-vm")
	}
	return nil
}
