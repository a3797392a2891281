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

// What is said by the control socket of a process: its setup, a reply, the number of its
// terminal in the container (or -1), and a reply where the workload could not be executed.
type (
	setup struct {
		Process *specs.Process
		// Spec is that of the container, for its first process.
		Spec *specs.Spec
		// Namespaces are flags: those that the container has of its own.
		Namespaces uintptr
		// Image is where the container's root filesystem is, if it is not shared by the host.
		Image string
		// Volumes are mounts of the spec that show a volume, by their index.
		Volumes map[int]*volumeMount
		// Join is the container's first process, for a further one.
		Join int
	}
	reply struct {
		Error     string
		NotKnown  bool
		SetupDone bool
	}
)

// volumeMount is a directory of a volume.
type volumeMount struct {
	Path, Sub string
	Info      abi.Info
}

// workload begins as this program and becomes a process of a container. The agent learns
// why it does not.
func workload() error {
	// A process of the container must not reach this program by /proc and change it.
	_ = unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
	unix.CloseOnExec(controlFD)
	control := os.NewFile(controlFD, "control")
	said := json.NewDecoder(control)
	say := func(err error) error {
		answer := reply{SetupDone: err == nil}
		if err != nil {
			answer.Error, answer.NotKnown = err.Error(), errors.Is(err, errNotKnown)
		}
		return errors.Join(err, json.NewEncoder(control).Encode(answer))
	}
	var s setup
	if err := said.Decode(&s); err != nil {
		return err
	}
	var err error
	if s.Join != 0 {
		err = join(s.Join)
	} else {
		err = s.mount()
	}
	if err := say(err); err != nil {
		return err
	}
	var terminal int
	if err := said.Decode(&terminal); err != nil {
		return err
	}
	return say(become(s.Process, terminal))
}

// join brings this thread into the namespaces of a container. It has been started in the
// container's process namespace.
func join(pid int) error {
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
