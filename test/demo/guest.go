package main

import (
	"bufio"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/rig/kata"
)

// guest is a sandbox: its VM, the shim that answers for it, and its filesystem.
type guest struct {
	mount, device, loop string
	vm                  *kata.VM
	disk                *os.File // which the VM holds open
	shim                *kata.Shim
	writes              byte
}

// containerID is that of the pod's only container.
const containerID = "app"

// playSandbox is the sandbox's process.
func playSandbox(dir, id, target string) error {
	g, err := boot(dir, id, target)
	if err != nil {
		fmt.Println("failed", err)
		return err
	}
	fmt.Println("ok", g.loop)
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		answer, err := g.obey(lines.Text())
		if err != nil {
			fmt.Println("failed", err)
			continue
		}
		fmt.Println("ok", answer)
		if lines.Text() == "stop" {
			return nil
		}
	}
	_, err = g.obey("stop")
	return err
}

// boot starts the pod's container, as Kata's shim does, and answers for its volume.
func boot(dir, id, target string) (*guest, error) {
	g := &guest{mount: dir + "/guest-" + id}
	g.vm = &kata.VM{
		Flavor: kata.Go, SandboxID: id, DirectVolumes: dir + "/kata/direct-volumes", Plug: g.plug, Unplug: g.unplug, Agent: g.create,
	}
	if err := g.vm.CreateContainer(containerID, []kata.Mount{{Destination: "/data", Source: target}}); err != nil {
		return nil, err
	}
	var err error
	g.shim, err = kata.Start(kata.Options{
		Flavor: kata.Go, SandboxID: id, Sandboxes: dir + "/vc",
		Mounts: map[string]kata.Statfs{g.device: kata.MountedAt(g.mount)},
	})
	if err != nil {
		return nil, errors.Join(err, g.end())
	}
	return g, nil
}

// plug attaches the device as a VMM does, plainly, and holds it open. What the guest
// sees of it is a loop device.
func (g *guest) plug(device string, _ bool) (slot string, err error) {
	if g.disk, err = os.OpenFile(device, os.O_RDWR, 0); err != nil { //nolint:gosec // the demo's own device
		return "", err
	}
	if g.loop, err = loopdev.Attach(device, loopdev.Options{}); err != nil {
		return "", errors.Join(err, g.disk.Close())
	}
	g.device = device
	return g.loop, nil
}

func (g *guest) unplug(string) {
	if err := errors.Join(loopdev.Detach(g.loop), g.disk.Close()); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
}

// create mounts the container's volume where only this namespace sees it.
func (g *guest) create(request kata.Request) error {
	if len(request.Storages) != 1 {
		return fmt.Errorf("%d volumes, and the pod has one", len(request.Storages))
	}
	volume := request.Storages[0]
	return errors.Join(os.MkdirAll(g.mount, 0o700), unix.Mount(volume.Source, g.mount, volume.FSType, 0, ""))
}

// end unmounts the filesystem, and unplugs the device.
func (g *guest) end() error {
	err := unix.Unmount(g.mount, 0)
	g.vm.RemoveContainer(containerID)
	return err
}

func (g *guest) obey(command string) (string, error) {
	switch command {
	case "write":
		return g.write()
	case "df":
		var st unix.Statfs_t
		err := unix.Statfs(g.mount, &st)
		return fmt.Sprint(uint64(st.Bsize)*st.Blocks, " ", uint64(st.Bsize)*(st.Blocks-st.Bfree)), err //nolint:gosec // a block size is positive
	case "stop":
		return "", errors.Join(g.shim.Stop(), g.end())
	default:
		return "", fmt.Errorf("unknown command %q", command)
	}
}

const dataSize = 20 << 20

// write writes data that is new each time, a MiB after the other to the disk, and
// tells its checksum and when it was done.
func (g *guest) write() (string, error) {
	g.writes++
	seed := [32]byte{g.writes, byte(os.Getpid()), byte(os.Getpid() >> 8)}
	data := make([]byte, dataSize)
	_, _ = rand.NewChaCha8(seed).Read(data) // never fails
	file, err := os.Create(g.mount + "/data")
	if err != nil {
		return "", err
	}
	for part := range slices.Chunk(data, 1<<20) {
		_, writeErr := file.Write(part)
		if err = errors.Join(writeErr, file.Sync()); err != nil {
			break
		}
	}
	if err = errors.Join(err, file.Close()); err != nil {
		return "", err
	}
	return fmt.Sprintf("%x %d", sha256.Sum256(data), time.Now().UnixNano()), nil
}

// peek mounts the disk read-only in a namespace of its own and tells the
// checksum of the data.
func peek(device, dir string) error {
	if err := unix.Mount(device, dir, "ext4", unix.MS_RDONLY, ""); err != nil {
		return err
	}
	raw, err := os.ReadFile(dir + "/data") //nolint:gosec // the demo's own directory
	if err == nil {
		fmt.Printf("%x", sha256.Sum256(raw))
	}
	return errors.Join(err, unix.Unmount(dir, 0))
}
