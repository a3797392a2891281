package agent

import (
	"fmt"
	"io"
	"os"
	"runtime"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/reference/runc"
)

const usage = `crust-runc-agent answers on a socket what ` + "`crust-runc crust`" + ` answers as a program.
crust-runc starts it with the first container that has a deferred volume; it ends a
few seconds after the last sandbox. It takes no arguments.
`

// Main runs the agent and gives its exit status.
func Main(args []string, stdout, stderr io.Writer) int {
	if len(args) > 1 && args[1] == abi.Word {
		// It is asked to be what it freezes by: a watchdog.
		return runc.Main(args, stdout, stderr)
	}
	if len(args) == 2 && (args[1] == "--help" || args[1] == "-h") {
		_, _ = io.WriteString(stdout, usage)
		return abi.ExitOK
	}
	if len(args) > 1 {
		_, _ = io.WriteString(stderr, usage)
		return abi.ExitUsage
	}
	// A call is a chain of goroutines that wait for each other: on one processor each
	// finds the next one ready.
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(1)
	}
	cfg, err := runc.LoadConfig(os.Getenv)
	if err == nil {
		err = Run(cfg)
	}
	if err != nil {
		_, _ = fmt.Fprintln(stderr, "crust-runc-agent:", err)
		return abi.ExitRefused
	}
	return abi.ExitOK
}
