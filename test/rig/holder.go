package rig

import (
	"os/exec"
	"sync"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// Holder is a process that has a device open as a VMM has, whatever became of its shim:
// nobody but the kernel knows of it.
type Holder struct {
	*exec.Cmd
	// End ends it. It may be called again.
	End func()
}

// Hold has a process open a device by a shell's redirection, such as "<>".
func Hold(t T, how, device string) *Holder {
	t.Helper()
	return HoldBy(t, exec.Command("sh", "-c", `exec 3`+how+`"$0"; echo open; exec cat`, device))
}

// HoldBy has a command open a device, which writes something once it has, and ends with its input.
func HoldBy(t T, cmd *exec.Cmd) *Holder {
	t.Helper()
	stdin := check.Value(cmd.StdinPipe())(t)
	stdout := check.Value(cmd.StdoutPipe())(t)
	check.Must(t, cmd.Start())
	h := &Holder{Cmd: cmd, End: sync.OnceFunc(func() { _ = stdin.Close(); _ = cmd.Wait() })}
	t.Cleanup(h.End)
	_, err := stdout.Read(make([]byte, 16))
	check.Require(t, err == nil, "%v did not open its device: %v", cmd.Args, err)
	return h
}
