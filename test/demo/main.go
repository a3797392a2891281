// Command demo shows one volume's whole way, with real parts: the daemon, a loop
// device, ext4, a mount that only its owner sees, as that of a microVM, and an
// emulated Kata shim on a real socket. With the argument vm, pods are run by containerd in
// virtual machines of crust-vm, and nothing is played. Each thing that it says it checks, and its exit code
// tells whether all of it was true.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/crust-proxy/crust-proxy/test/rig"
)

func main() {
	tell := story
	if len(os.Args) == 2 && os.Args[1] == "vm" {
		tell = storyOfVMs
	} else if len(os.Args) > 1 {
		fmt.Fprintln(os.Stderr, "demo: make demo, or make demo-vm")
		os.Exit(1)
	}
	os.Exit(rig.Run(func() int { return show(tell) }, 0))
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
