package kata

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// Guest is a sandbox of the Go runtime with one volume: a VM that has the disk open, a guest that has it mounted where
// nobody else sees it, and the shim that answers for them. It lives in this process.
type Guest struct {
	// Device is the disk, and Loop what the guest sees of it; "" where none is plugged in.
	Device, Loop string
	Shim         *Shim

	vm       *VM
	disk     *os.File // which the VM holds open
	root     *os.File // of the guest's filesystem
	problems error
}

// containerID is that of the only container of a guest.
const containerID = "app"

// Boot starts a sandbox with a container that mounts a target, as the shim does. The directories are Kata's.
func Boot(id, directVolumes, sandboxes, target string) (*Guest, error) {
	g := &Guest{}
	g.vm = &VM{Flavor: Go, SandboxID: id, DirectVolumes: directVolumes, Plug: g.plug, Unplug: g.unplug, Agent: g.create}
	err := g.vm.CreateContainer(containerID, []Mount{{Destination: "/data", Source: target}})
	if err == nil {
		g.Shim, err = Start(Options{
			Flavor: Go, SandboxID: id, Sandboxes: sandboxes, Mounts: map[string]Statfs{g.Device: MountedAt(g.Dir())},
		})
	}
	if err != nil {
		return nil, errors.Join(err, g.Stop())
	}
	return g, nil
}

// Dir is where this process sees the guest's filesystem.
func (g *Guest) Dir() string { return fmt.Sprintf("/proc/self/fd/%d", g.root.Fd()) }

// plug attaches a device as a VMM does, plainly.
func (g *Guest) plug(device string, readOnly bool) (slot string, err error) {
	mode := os.O_RDWR
	if readOnly {
		mode = os.O_RDONLY
	}
	if g.disk, err = os.OpenFile(device, mode, 0); err != nil { //nolint:gosec // a test's own device
		return "", err
	}
	if g.Loop, err = loopdev.Attach(device, loopdev.Options{ReadOnly: readOnly}); err != nil {
		return "", errors.Join(err, g.disk.Close())
	}
	g.Device = device
	return g.Loop, nil
}

func (g *Guest) unplug(string) {
	g.problems = errors.Join(g.problems, loopdev.Detach(g.Loop), g.disk.Close())
	g.Loop = ""
}

// create mounts what the guest's agent is asked to.
func (g *Guest) create(request Request) (err error) {
	if len(request.Storages) != 1 {
		return fmt.Errorf("%d volumes, and the pod has one", len(request.Storages))
	}
	volume := request.Storages[0]
	var options []string
	if slices.Contains(volume.Options, "ro") {
		options = append(options, "ro")
	}
	g.root, err = rig.MountAside(volume.Source, volume.FSType, options...)
	return err
}

// Stop ends the sandbox in an orderly way: its guest unmounts, and its VM and its shim end. It may be called again.
func (g *Guest) Stop() error {
	if g.Loop == "" {
		return nil
	}
	err := g.root.Close()
	g.vm.RemoveContainer(containerID)
	if g.Shim != nil {
		err = errors.Join(err, g.Shim.Stop())
	}
	return errors.Join(err, g.problems)
}
