// Command bench measures crust-proxy against what it must be compared with, side
// by side in one run, and writes the ratios to docs/performance.md. It needs
// root, and works in a mount namespace of its own.
package main

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"

	"github.com/crust-proxy/crust-proxy/test/rig"
)

func main() { os.Exit(run()) }

// The bench starts itself again in these roles.
const (
	roleInside = "inside"
	roleEmpty  = "empty"
	roleShims  = "shims"
	roleCLI    = "cli"
	roleDriver = "driver"
	roleDefers = "defers"
	roleNode   = "node"
	roleSpin   = "spin"
)

func run() int {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case roleEmpty:
			return report(serveEmpty(os.Args[2]))
		case roleShims:
			return report(serveShims(os.Args[2:]))
		case roleCLI:
			return report(statsOnce(os.Args[2], os.Args[3]))
		case roleDriver:
			return report(serveDriver(os.Args[2], os.Args[3]))
		case roleDefers:
			return report(serveDeferring(os.Args[2], os.Args[3], os.Args[4]))
		case roleNode:
			return report(serveNode(os.Args[2], os.Args[3]))
		case roleSpin:
			return report(spin(os.Args[2]))
		case roleInside:
			return report(inside(os.Args[2:]))
		}
	}
	if os.Geteuid() != 0 {
		return report(fmt.Errorf("the benchmarks mount and use loop devices: run them as root"))
	}
	return report(enter())
}

func report(err error) int {
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		return 1
	}
	return 0
}

// enter starts the bench again in a mount namespace of its own: what it leaves
// mounted when it is killed goes with it.
func enter() error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.Command(self, append([]string{roleInside}, os.Args[1:]...)...) //nolint:gosec // ourselves
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	ignored := make(chan os.Signal, 1)
	signal.Notify(ignored, os.Interrupt) // the child gets it too, and cleans up
	return cmd.Run()
}

// settings are the flags.
type settings struct {
	quick bool
	pprof bool
	only  string
	out   string
}

func (s settings) scale(n int) int {
	if s.quick {
		return max(1, n/10)
	}
	return n
}

func inside(args []string) error {
	if err := rig.MakeMountsPrivate(); err != nil {
		return err
	}
	var s settings
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.BoolVar(&s.quick, "quick", false, "a tenth of the rounds; writes no file")
	flags.BoolVar(&s.pprof, "pprof", false, "serve the daemon's profiles on its http.sock; writes no file")
	flags.StringVar(&s.only, "only", "", "one figure: latency, rate, process, hung, passthrough, pods, kube, cluster, scale, growth or size")
	flags.StringVar(&s.out, "out", "docs/performance.md", "the page to write")
	if err := flags.Parse(args); err != nil {
		return err
	}
	return measure(s)
}
