// Command demo shows one volume's whole way, with real parts: the daemon, a loop
// device, ext4, a mount namespace that plays the microVM, and an emulated Kata
// shim on a real socket. Each thing that it says it checks, and its exit code
// tells whether all of it was true.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"syscall"

	"github.com/crust-proxy/crust-proxy/test/rig"
)

// The demo starts itself again in these roles.
const (
	roleHost    = "host"    // the node, in a mount namespace of its own
	roleSandbox = "sandbox" // the pod's microVM, in another
	rolePeek    = "peek"    // a look at the disk afterwards, in a third
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

func run() error {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case roleHost:
			return host()
		case roleSandbox:
			return playSandbox(os.Args[2:])
		case rolePeek:
			return peek(os.Args[2], os.Args[3])
		}
	}
	if os.Geteuid() != 0 {
		return errors.New("loop devices and mounts need root: run it as root, or with sudo")
	}
	return playHost()
}

// playHost waits for the node, whatever comes: it passes on what should end the
// demo, so that the node has the time to clean up.
func playHost() error {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	cmd, err := again(roleHost)
	if err != nil {
		return err
	}
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	// The kernel ties Pdeathsig to the thread that started the child.
	runtime.LockOSThread()
	if err := cmd.Start(); err != nil {
		return err
	}
	go func() {
		for s := range signals {
			_ = cmd.Process.Signal(s) // it may have ended by itself
		}
	}()
	if err := cmd.Wait(); err != nil {
		return errors.New("not everything was true, or the demo was stopped: see above")
	}
	return nil
}

// again prepares the demo in another role, in a mount namespace of its own: what
// is left mounted when it is killed goes with it. Ctrl-C does not reach it: who
// started it decides when it ends.
func again(args ...string) (*exec.Cmd, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self, args...) //nolint:gosec // ourselves
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL, Setpgid: true}
	return cmd, nil
}

// host plays the node.
func host() (err error) {
	runtime.LockOSThread() // all children are started from here, and die with it
	if err := rig.MakeMountsPrivate(); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	defer stop()
	n, err := newNode()
	if n != nil {
		defer func() { err = errors.Join(err, cleanUp(n)) }()
	}
	if err != nil {
		return err
	}
	if err := story(ctx, n); err != nil {
		fmt.Printf("\n%s%v%s\n", red, err, plain)
		return err
	}
	return nil
}
