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
	"syscall"

	"golang.org/x/sys/unix"
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
	signal.Ignore(os.Interrupt) // the child gets it too, and cleans up
	cmd, err := again(context.Background(), roleHost)
	if err != nil {
		return err
	}
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	return cmd.Run()
}

// again prepares the demo in another role, in a mount namespace of its own: what
// is left mounted when it is killed goes with it.
func again(ctx context.Context, args ...string) (*exec.Cmd, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, self, args...) //nolint:gosec // ourselves
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	return cmd, nil
}

func makePrivate() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	return nil
}

// host plays the node.
func host() (err error) {
	if err := makePrivate(); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	n, err := newNode()
	if n != nil {
		defer func() { err = errors.Join(err, cleanUp(n)) }()
	}
	if err != nil {
		return err
	}
	return story(ctx, n)
}

// cleanUp takes everything away and says so if it is true.
func cleanUp(n *node) error {
	err := n.close()
	if err == nil {
		fmt.Println("Cleaned up: no mount, loop device, socket or file is left.")
	}
	return err
}
