// Command demo shows one volume's whole way, with real parts: the daemon, a loop device, ext4, a mount that only its
// owner sees, as that of a microVM, and an emulated Kata shim on a real socket. With the argument pod, containerd runs
// pods by crust-runc; with vm, in virtual machines of crust-vm. Each thing that it says it checks, and its exit code
// tells whether all of it was true.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/crust-proxy/crust-proxy/test/rig"
)

func main() {
	stories := map[string]func(rig.T){"": story, "pod": storyOfPods, "vm": storyOfVMs}
	tell := stories[strings.Join(os.Args[1:], " ")]
	if tell == nil {
		fmt.Fprintln(os.Stderr, "demo: make demo, make demo-pod or make demo-vm")
		os.Exit(1)
	}
	os.Exit(rig.Run(func() int { return show(tell) }, 0))
}

// show tells the story, takes everything away, whatever happened, and looks whether that is so.
func show(story func(rig.T)) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	defer stop()
	signal.Ignore(syscall.SIGPIPE) // `make demo | head` still cleans up
	err := rig.Do(ctx, story)
	if ctx.Err() != nil {
		err = errors.New("interrupted")
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "\n%s%v%s\n", red, err, plain)
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
