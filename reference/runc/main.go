// Package runc is the reference runtime handler: an OCI runtime that is runc,
// and mounts deferred volumes in the sandbox's mount namespace where a container
// has some.
//
// docs/crust-runc.md tells how, and why so.
package runc

import (
	"fmt"
	"io"
	"os"
	"runtime"
	"syscall"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// Main runs the program and gives its exit status. Where it becomes runc it does
// not return.
func Main(args []string, stdout, stderr io.Writer) int {
	// The thread that becomes runc takes its mount namespace along.
	runtime.LockOSThread()
	if len(args) > 1 && args[1] == abi.Word {
		return crustMain(args[2:], stdout, stderr)
	}
	in := parseArgs(args[1:])
	tell := teller{in: in, stderr: stderr}
	cfg, err := LoadConfig(os.Getenv)
	if err != nil {
		tell.fail(err)
		return 1
	}
	path, err := cfg.runtime()
	if err != nil {
		tell.fail(err)
		return 1
	}
	if in.starts() {
		c := &creator{cfg: cfg, runtime: path, in: in, tell: tell}
		if err := c.prepare(); err != nil {
			tell.fail(err)
			return 1
		}
	}
	// What this process was given it hands on: runc has its pid, its descriptors,
	// its terminal and its signals.
	err = syscall.Exec(path, append([]string{path}, args[1:]...), os.Environ()) //nolint:gosec // the operator's runc
	tell.fail(fmt.Errorf("%s cannot be run: %w", path, err))
	return 1
}

// starts tells whether runc is to set up the mounts of a container.
func (in invocation) starts() bool {
	return in.command == "create" || in.command == "run" || in.command == "restore"
}
