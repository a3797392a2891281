// Package vmnode is a node whose pods run in virtual machines: containerd with crust-vm, crust-proxy in front of the
// reference driver, and a watch over the host's mounts. NewRunc makes one whose pods are containers of crust-runc.
package vmnode

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/reference/mountwatch"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
	"github.com/crust-proxy/crust-proxy/test/rig/csivolume"
)

// Handler is the runtime handler of the pods.
const Handler = "crust"

// Node is such a node.
type Node struct {
	*Runtime // nil with crust-runc

	CRI    *cri.Node
	Daemon *rig.Daemon
	Driver *csivolume.Driver
	// Mounts sees each mount on the host of the volumes that New's callers name to it.
	Mounts *mountwatch.Watch
}

// New makes the node and starts all of it, the driver with further arguments. It goes with
// the test. programs is a directory with ours; empty has them be built.
func New(t rig.T, programs string, driver ...string) *Node {
	t.Helper()
	rig.Need(t, "qemu-system-x86_64", "busybox")
	n := newNode(t, programs)
	n.Runtime = Install(t, n.Daemon.Dir, n.Daemon.Program)
	n.CRI = cri.New(t, cri.Options{
		Handlers: map[string]string{Handler: n.Program}, Env: n.Env(), Others: n.IsMachine,
	})
	// An emulated guest takes seconds to begin a freeze.
	n.start(t, n.Program, fmt.Sprintf("socketDirs: [%s], ", n.State), append(driver, "--freeze-limit", "60s")...)
	return n
}

// NewRunc does the same with crust-runc.
func NewRunc(t rig.T, programs string) *Node {
	t.Helper()
	rig.Need(t, "busybox")
	n := newNode(t, programs)
	n.Daemon.Program("crust-runc-agent")
	program := n.Daemon.Program("crust-runc")
	n.CRI = cri.New(t, cri.Options{Handlers: map[string]string{Handler: program}})
	t.Cleanup(func() { // its agent stays some seconds after the last sandbox
		_ = rig.KillAll(func() []int {
			return rig.Processes(func(proc string) bool {
				name, _ := os.Readlink(proc + "/exe")
				return name == program+"-agent" && sameNamespace(proc)
			})
		})
	})
	n.start(t, program, "")
	return n
}

func newNode(t rig.T, programs string) *Node {
	t.Helper()
	n := new(Node)
	// Its thread ends with it, and with a thread all processes that it has started: so it
	// comes before them and goes after them.
	n.Mounts = check.Value(mountwatch.New())(t)
	t.Cleanup(func() { check.Must(t, n.Mounts.Close()) })
	n.Daemon = rig.NewDaemon(t)
	n.Daemon.Programs = programs
	return n
}

// start starts daemon and driver; the handler may have further YAML.
func (n *Node) start(t rig.T, program, handler string, driver ...string) {
	t.Helper()
	n.Daemon.Containerd = n.CRI.Socket
	n.Daemon.Handlers = fmt.Sprintf("default: crust\ncrust: {enabled: true, programs: [%s], %stempDir: /run/crust-temp}", program, handler)
	n.Driver = csivolume.Start(t, n.Daemon, driver...)
}

// Machine is the process of the pod's virtual machine. The pod's process is the supervisor, whose child it is.
func (n *Node) Machine(ctx context.Context, pod *cri.Pod) (int, error) {
	supervisor, err := pod.Pid(ctx)
	if err != nil {
		return 0, err
	}
	pids := slices.DeleteFunc(rig.Children(supervisor), func(pid int) bool { return !isQEMU(fmt.Sprintf("/proc/%d", pid)) })
	if len(pids) != 1 {
		return 0, fmt.Errorf("supervisor %d has the machines %v", supervisor, pids)
	}
	return pids[0], nil
}

// End removes a pod of which something was killed, as kubelet does: again and again. containerd may have let go of a
// container's task and not yet know that it ended; it then stops the sandbox, and refuses to remove it.
func End(ctx context.Context, t rig.T, pod *cri.Pod) {
	t.Helper()
	check.Succeeds(t, "the sandbox is removed", func() error { return pod.Remove(ctx) })
}

// Console is the end of what a sandbox's machine and supervisor have said.
func (n *Node) Console(pod *cri.Pod) string {
	raw, err := os.ReadFile(filepath.Join(n.State, pod.ID, "log"))
	if err != nil {
		return err.Error()
	}
	return rig.Tail(string(raw))
}

// Watch has each mount of a device on the host be a failure.
func (n *Node) Watch(device string) error {
	number, err := deviceNumber(device)
	if err == nil {
		n.Mounts.Add(device, number)
	}
	return err
}

func deviceNumber(device string) (string, error) {
	number, err := os.ReadFile("/sys/class/block/" + filepath.Base(device) + "/dev") //nolint:gosec // a file of the kernel's
	return strings.TrimSpace(string(number)), err
}

// Unwatch forgets a device, which is free and may be another's next.
func (n *Node) Unwatch(device string) error {
	number, err := deviceNumber(device)
	n.Mounts.Remove(device, number)
	return err
}

// Device is the device that a volume was handed over with.
func (n *Node) Device(v *csivolume.Volume) (string, error) {
	dir, err := abi.Open(abi.DefaultRoot, abi.DirName(v.Target))
	if err != nil {
		return "", err
	}
	defer func() { _ = dir.Close() }()
	info, err := dir.Info()
	return info.Device, err
}

// WantClean fails where anything of a volume or of a sandbox is left.
func (n *Node) WantClean(t rig.T) {
	t.Helper()
	n.Daemon.WantClean()
	check.Must(t, n.Mounts.CheckNone())
	patterns := []string{abi.DefaultRoot + "/*", "/run/crust-temp/*/*"}
	if n.Runtime != nil {
		patterns = append(patterns, n.State+"/[^.]*")
	}
	for _, pattern := range patterns {
		left, err := filepath.Glob(pattern)
		check.That(t, err == nil && len(left) == 0, "left behind: %q, %v", left, err)
	}
	check.Empty(t, n.Machines(), "machines that still run")
}
