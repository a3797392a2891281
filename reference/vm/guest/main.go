package guest

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"

	"github.com/crust-proxy/crust-proxy/reference/fsops"
)

// The program starts itself under these words.
const (
	self = "/proc/self/exe"

	wordAgent    = "agent"
	wordWorkload = "workload"
	wordWatch    = "watch"
)

const about = "the first program of a virtual machine: crust-vm starts it there, and nobody elsewhere"

// Main is the whole program. It gives the exit code.
func Main(args []string) int {
	// What a container's process sets of itself, it sets of this thread.
	runtime.LockOSThread()
	word := ""
	if len(args) > 1 {
		word = args[1]
	}
	var err error
	switch {
	case word == wordAgent:
		err = agent()
	case word == wordWorkload:
		err = workload()
	case word == wordWatch:
		err = fsops.Watch(args[2:])
	case word == "" && os.Getpid() == 1:
		err = first()
	case word == "--help":
		fmt.Println("This is " + about + ".")
	default:
		err = errors.New("this is " + about)
	}
	if err != nil {
		_, _ = fmt.Fprintln(os.Stderr, strings.TrimSpace("crust-vm-agent "+word)+":", err)
		return 1
	}
	return 0
}
