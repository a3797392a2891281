package guest

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// The messages on the control socket of a process, in this order: the agent sends the setup,
// the process a reply, the agent the number of the terminal in the container (or -1), and the
// process a reply if it could not execute the workload.
type (
	setup struct {
		Process *specs.Process
		// Spec is the container's spec; it is set for the container's own process.
		Spec *specs.Spec
		// Namespaces are the flags of the namespaces that the container does not share.
		Namespaces uintptr
		// Volumes are the volumes of the spec's mounts, by the index of the mount.
		Volumes map[int]*volumeMount
		// Join is the pid of the container's own process; it is set for an exec.
		Join int
	}
	reply struct {
		Error       string
		Unsupported bool
		SetupDone   bool
	}
)

type volumeMount struct {
	Path, Sub string
	Info      abi.Info
}

// workload sets itself up as a process of a container, then executes the container's program. Errors go to the agent.
func workload() error {
	// No process of the container may reach this program through /proc, or change it.
	_ = unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
	unix.CloseOnExec(controlFD)
	control := os.NewFile(controlFD, "control")
	messages := json.NewDecoder(control)
	send := func(err error) error {
		r := reply{SetupDone: err == nil}
		if err != nil {
			r.Error, r.Unsupported = err.Error(), errors.Is(err, errUnsupported)
		}
		return errors.Join(err, json.NewEncoder(control).Encode(r))
	}
	var s setup
	if err := messages.Decode(&s); err != nil {
		return err
	}
	var err error
	if s.Join != 0 {
		err = joinContainer(s.Join)
	} else {
		err = s.mount()
	}
	if err := send(err); err != nil {
		return err
	}
	var terminal int
	if err := messages.Decode(&terminal); err != nil {
		return err
	}
	return send(become(s.Process, terminal))
}

// joinContainer moves this thread into the namespaces of a container, except for the PID
// namespace, in which the agent has started it.
func joinContainer(pid int) error {
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return err
	}
	var open []int
	for _, name := range []string{"ipc", "uts", "net", "cgroup", "mnt"} {
		ns, err := openNamespace(pid, name)
		if err != nil {
			return fmt.Errorf("open the container's namespace %s: %w", name, err)
		}
		open = append(open, ns)
	}
	for _, ns := range open {
		if err := errors.Join(unix.Setns(ns, 0), unix.Close(ns)); err != nil {
			return fmt.Errorf("enter the container: %w", err)
		}
	}
	return nil
}
