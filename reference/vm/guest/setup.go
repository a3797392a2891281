package guest

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// containerSetup is what the first process of a container has to know.
type containerSetup struct {
	Spec *specs.Spec
	// Volumes are mounts of the spec that show a volume, by their index.
	Volumes map[int]volumeMount
}

// volumeMount is a directory of a volume.
type volumeMount struct {
	Path, Sub string
	Info      abi.Info
}

// execSetup is what a further process of a container has to know.
type execSetup struct {
	Process *specs.Process
	// PID is the container's first process.
	PID int
}

// control is the process' end of its control socket.
type control struct {
	file   *os.File
	decode *json.Decoder
}

func openControl() control {
	// A process of the container must not reach this program by /proc and change it.
	_ = unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
	unix.CloseOnExec(controlFD)
	file := os.NewFile(controlFD, "control")
	return control{file: file, decode: json.NewDecoder(file)}
}

// say replies. The agent is told why this process ends.
func (c control) say(err error) error {
	said := reply{SetupDone: err == nil}
	if err != nil {
		said.Error, said.NotKnown = err.Error(), errors.Is(err, errNotKnown)
	}
	return errors.Join(err, json.NewEncoder(c.file).Encode(said))
}

// containerProcess is the first process of a container, from its namespaces on.
func containerProcess() error {
	c := openControl()
	var setup containerSetup
	if err := c.decode.Decode(&setup); err != nil {
		return err
	}
	if err := c.say(setUp(&setup)); err != nil {
		return err
	}
	return c.execute(setup.Spec.Process)
}

// execProcess is a further process of a container. It has been started in the
// container's process namespace, and goes into the others by itself.
func execProcess() error {
	c := openControl()
	var setup execSetup
	if err := c.decode.Decode(&setup); err != nil {
		return err
	}
	if err := c.say(join(setup.PID)); err != nil {
		return err
	}
	return c.execute(setup.Process)
}

// join brings this thread into the namespaces of a container.
func join(pid int) error {
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return err
	}
	dir := "/proc/" + strconv.Itoa(pid) + "/ns/"
	var open []int
	for _, name := range []string{"ipc", "uts", "net", "cgroup", "mnt"} {
		ns, err := unix.Open(dir+name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
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

// execute waits for the go and becomes the workload. It comes back when that fails.
func (c control) execute(p *specs.Process) error {
	var is execution
	if err := c.decode.Decode(&is); err != nil {
		return err
	}
	return c.say(become(p, is.Terminal))
}
