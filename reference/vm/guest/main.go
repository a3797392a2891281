// Package guest is the program in crust-vm's virtual machines. As the init process it starts the agent and reaps orphans.
// The agent serves the host (package wire): it mounts volumes with the guest's kernel and runs the containers of the
// pod. When it ends, init turns the machine off. The machine is the sandbox: a container has its own PID and mount
// namespace, and shares network, host name and IPC unless its spec asks for its own.
package guest

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
)

// The roles of the program, as its first argument. Without one it is init.
const (
	self = "/proc/self/exe"

	roleAgent    = "agent"
	roleWorkload = "workload"
	roleWatch    = "watch"
)

const about = "the init program of crust-vm's virtual machines: it runs only there"

// Main runs the program and returns its exit status.
func Main(args []string) int {
	// The process of a container sets its namespaces and its user for this thread only.
	runtime.LockOSThread()
	role := ""
	if len(args) > 1 {
		role = args[1]
	}
	var err error
	switch {
	case role == roleAgent:
		err = agent()
	case role == roleWorkload:
		err = workload()
	case role == roleWatch:
		err = fsops.Watch(args[2:])
	case role == "" && os.Getpid() == 1:
		err = initProcess()
	case role == "--version":
		sys.PrintVersion(os.Stdout, "crust-vm-agent")
	case role == "--help":
		fmt.Println("This is " + about + ".")
	default:
		err = errors.New("this is " + about)
	}
	if err != nil {
		_, _ = fmt.Fprintln(os.Stderr, strings.TrimSpace("crust-vm-agent "+role)+":", err)
		return 1
	}
	return 0
}
