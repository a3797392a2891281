// Command demo shows one volume's whole way, with real parts: the daemon, a loop
// device, ext4, a mount namespace that plays the microVM, and an emulated Kata
// shim on a real socket. With the argument vm, pods are run by containerd in virtual
// machines of crust-vm, and nothing is played. Each thing that it says it checks, and its exit code
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

	"github.com/crust-proxy/crust-proxy/test/rig"
)

// The demo starts itself again in these roles.
const (
	roleSandbox = "sandbox" // the pod's microVM, in a mount namespace of its own
	rolePeek    = "peek"    // a look at the disk afterwards, in another
)

func main() {
	tell := story
	if len(os.Args) == 2 && os.Args[1] == "vm" {
		tell = storyOfVMs
	} else if len(os.Args) > 1 {
		if err := play(os.Args[1], os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, "demo:", err)
			os.Exit(1)
		}
		return
	}
	os.Exit(rig.Run(func() int { return show(tell) }, 0))
}

// play plays a role.
func play(role string, args []string) error {
	if err := rig.MakeMountsPrivate(); err != nil {
		return err
	}
	switch role {
	case roleSandbox:
		return playSandbox(args[0], args[1], args[2])
	case rolePeek:
		return peek(args[0], args[1])
	}
	return errors.New("make demo, or make demo-vm")
}

// again prepares the demo in another role, in a mount namespace of its own: what
// is left mounted when it is killed goes with it.
func again(args ...string) (*exec.Cmd, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self, args...) //nolint:gosec // ourselves
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	return cmd, nil
}

// show tells the story, takes everything away, whatever happened, and looks whether
// that is so.
func show(story func(rig.T)) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	defer stop()
	err := rig.Do(ctx, story)
	if ctx.Err() != nil {
		err = errors.New("interrupted")
	}
	if err != nil {
		fmt.Printf("\n%s%v%s\n", red, err, plain)
	} else {
		fmt.Printf("\n%sEverything shown was checked, and was true.%s\n", bold+green, plain)
	}
	if len(rig.Leaks()) > 0 {
		fmt.Printf("%s✗%s Not everything could be cleaned up.\n", red, plain)
		return 1
	}
	fmt.Printf("%s✓%s Cleaned up: no mount, loop device, socket or file is left.\n", green, plain)
	if err != nil {
		return 1
	}
	return 0
}
