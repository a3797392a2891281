//go:build system

package broker

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// TestForeignLoopDeviceOverTheSameImage: two loop devices over one image are one disk,
// also where the other one is not ours.
func TestForeignLoopDeviceOverTheSameImage(t *testing.T) {
	n := parallelNode(t)
	image := rig.Image(t, 32*mib)
	ours, foreign := rig.Loop(t, image, loopdev.Options{}), rig.Loop(t, image, loopdev.Options{})
	rig.Mkfs(t, "ext4", foreign)
	point := t.TempDir()
	check.Must(t, unix.Mount(foreign, point, "ext4", 0, ""))
	in := n.instruction("pod-1", ours)
	in.Format = volume.FormatNever
	prepared := &preparer{}
	n.cfg.Preparer = prepared
	n.restart()
	check.Kind(t, check.Err(n.Defer(t.Context(), in)), volume.InUse, foreign)
	check.Equal(t, prepared.calls, 0, "preparations before the refusal")
	check.Must(t, unix.Unmount(point, 0))

	// Nor need it be mounted: a VM of somebody else only has it open.
	file := check.Value(os.OpenFile(foreign, os.O_RDWR, 0))(t)
	vm := exec.Command("sleep", "600")
	vm.ExtraFiles = []*os.File{file}
	check.Must(t, vm.Start())
	check.Must(t, file.Close())
	_, err := n.Defer(t.Context(), in)
	_ = vm.Process.Kill()
	_ = vm.Wait()
	check.Kind(t, err, volume.InUse, foreign, strconv.Itoa(vm.Process.Pid))
	check.Equal(t, prepared.calls, 0, "preparations before the refusal")
	n.stage(in)
	by := rig.Hold(t, "<>", foreign)
	check.Kind(t, check.Err(n.Release(t.Context(), in.Target)), volume.Busy, foreign)
	by.End()

	// A volume of ours over the same image is refused before its device is looked at.
	second := n.instruction("pod-2", foreign)
	second.Format = volume.FormatNever
	check.Kind(t, check.Err(n.Defer(t.Context(), second)), volume.InUse)
	check.That(t, prepared.calls == 1, "%d preparations", prepared.calls)
	n.unstage(in.Target)

	n.cfg.Adopted = func() []*volume.Volume {
		return []*volume.Volume{{Target: "/theirs", Device: volume.Device{Path: foreign}}}
	}
	n.restart()
	check.Kind(t, check.Err(n.Defer(t.Context(), in)), volume.InUse)
	n.noLeftovers()
}

// TestForeignLoopDeviceOverTheDevice: sysfs shows no loop device above a disk or a
// partition, and the disk can be claimed while the loop device is mounted.
func TestForeignLoopDeviceOverTheDevice(t *testing.T) {
	n := parallelNode(t)
	disk := rig.Disk(t, 32*mib, "")
	part := n.partition(disk)
	point := t.TempDir()
	t.Cleanup(func() { _ = unix.Unmount(point, unix.MNT_DETACH) })
	for _, under := range []string{disk, part} {
		foreign := rig.Loop(t, under, loopdev.Options{})
		rig.Mkfs(t, "ext4", foreign)
		check.Must(t, unix.Mount(foreign, point, "ext4", 0, ""))
		for _, device := range []string{disk, part} {
			check.Kind(t, check.Err(n.Defer(t.Context(), n.instruction("pod-1", device))), volume.InUse, foreign)
		}
		check.Must(t, unix.Unmount(point, 0))
		n.stage(n.instruction("pod-1", under)) // a loop device that nobody uses is no obstacle
		n.unstage(n.target("pod-1"))
	}
	n.noLeftovers()
}

// partition makes a partition of a disk of 32 MiB.
func (n *node) partition(disk string) string {
	n.t.Helper()
	rig.Command(n.t, "addpart", disk, "1", "2048", "61440")
	n.t.Cleanup(func() { _ = exec.Command("delpart", disk, "1").Run() })
	return n.node(disk + "p1")
}

// TestPartitionsAndTheirDisk: a partition shares its disk's data, and not that of its neighbour.
func TestPartitionsAndTheirDisk(t *testing.T) {
	t.Parallel()
	n := newMountingNode(t)
	out := check.Value(exec.Command("losetup", "--find", "--show", "--partscan", rig.Image(t, 32*mib)).Output())(t)
	disk := strings.TrimSpace(string(out))
	t.Cleanup(func() { _ = loopdev.Detach(disk) })
	for _, part := range [][]string{{disk, "1", "2048", "16384"}, {disk, "2", "18432", "16384"}} {
		rig.Command(t, "addpart", part...)
	}
	one, two := n.node(disk+"p1"), n.node(disk+"p2")
	first := n.stage(n.forHost("pod-1", one))
	n.stage(n.forHost("pod-2", two))
	for _, restarted := range []bool{false, true} {
		if restarted {
			n.restart()
		}
		check.Kind(t, check.Err(n.Defer(t.Context(), n.forHost("pod-3", disk))), volume.InUse, "shares data")
	}
	n.unstage(n.target("pod-2"))
	n.unstage(first.Target)
	n.stage(n.forHost("pod-3", disk))
	check.Kind(t, check.Err(n.Defer(t.Context(), n.forHost("pod-1", one))), volume.InUse)
	n.unstage(n.target("pod-3"))
	n.noLeftovers()
}

// node makes a device node of its own for a device of the kernel's: /dev may have none.
func (n *node) node(device string) string {
	n.t.Helper()
	name := filepath.Base(device)
	raw := check.Value(os.ReadFile("/sys/class/block/" + name + "/dev"))(n.t)
	var major, minor uint32
	check.Must(n.t, check.Err(fmt.Sscanf(string(raw), "%d:%d", &major, &minor)))
	path := filepath.Join(n.kubelet, name)
	check.Must(n.t, unix.Mknod(path, unix.S_IFBLK|0o600, int(unix.Mkdev(major, minor)))) //nolint:gosec // small
	return path
}

// preparer counts how often a device is looked at.
type preparer struct {
	calls     int
	meanwhile func() // is called by Prepare, if set
}

func (p *preparer) Prepare(context.Context, deferral.Preparation) error {
	if p.calls++; p.meanwhile != nil {
		p.meanwhile()
	}
	return nil
}

// TestCallerThatGoesDuringThePreparation: kubelet's call ends after two minutes, and a check of a large filesystem that
// leads to nothing would begin anew with each repeat.
func TestCallerThatGoesDuringThePreparation(t *testing.T) {
	n := parallelNode(t)
	ctx, gone := context.WithCancel(t.Context())
	n.cfg.Preparer = &preparer{meanwhile: gone}
	n.restart()
	in := n.instruction("pod-1", rig.Disk(t, 32*mib, "ext4"))
	in.Format = volume.FormatHost
	check.Must(t, check.Err(n.Defer(ctx, in)))
	n.unstage(in.Target)
	n.noLeftovers()
}

// TestLoopDevicesOverLoopDevices: whatever lies between a device and the image that has its
// data, a second volume over the image is refused, in either order.
func TestLoopDevicesOverLoopDevices(t *testing.T) {
	t.Parallel()
	n := newMountingNode(t)
	image := rig.Image(t, 32*mib)
	loop := func(backing string) string { return rig.Loop(t, backing, loopdev.Options{}) }
	detach := func(devices ...string) func() {
		return func() {
			for _, device := range devices {
				check.Must(t, loopdev.Detach(device))
			}
		}
	}
	// Each makes a device over the image, and what takes it down.
	upper := func() (string, func()) { lower := loop(image); over := loop(lower); return over, detach(over, lower) }
	other := func() (string, func()) { one := loop(image); return one, detach(one) }
	flags := make(map[string][]string)
	partOf := func(opts loopdev.Options, with ...string) func() (string, func()) {
		return func() (string, func()) {
			lower := rig.Loop(t, image, opts)
			name := n.partition(lower)
			flags[name] = with
			return name, func() {
				check.Must(t, os.Remove(name))
				check.Must(t, exec.Command("delpart", lower, "1").Run())
				check.Must(t, loopdev.Detach(lower))
			}
		}
	}
	readOnly := loopdev.Options{ReadOnly: true} // the kernel does not count who reads an image
	part, reader := partOf(loopdev.Options{}), partOf(readOnly, "ro")
	for _, pair := range [][2]func() (string, func()){{other, other}, {upper, other}, {part, other}, {part, upper}, {reader, other}} {
		for i := range pair {
			for again, handler := range []string{"fake", "host", "fake"} {
				first, end := pair[i]()
				in := n.instruction("pod-1", first, flags[first]...)
				in.Handler = handler
				n.stage(in)
				if again > 1 {
					n.restart()
				}
				second, endSecond := pair[1-i]()
				_, err := n.Defer(t.Context(), n.instruction("pod-2", second))
				if volume.KindOf(err) != volume.InUse || err == nil {
					t.Errorf("%s beside %s, which a volume of the handler %q has: %v", second, first, handler, err)
					_, _ = n.Release(t.Context(), n.target("pod-2"))
				}
				endSecond()
				n.unstage(in.Target)
				end()
			}
		}
	}
	read, end := reader()
	n.stage(n.instruction("pod-1", read, "ro"))
	n.stage(n.instruction("pod-2", rig.Loop(t, image, readOnly), "ro"))
	n.unstage(n.target("pod-2"))
	n.unstage(n.target("pod-1"))
	end()
	over, end := upper()
	by := rig.Hold(t, "<>", image)
	wantOpenIn(t, check.Err(n.Defer(t.Context(), n.instruction("pod-1", over))), by)
	end()
	one, endPart := part()
	wantOpenIn(t, check.Err(n.Defer(t.Context(), n.instruction("pod-1", one))), by)
	by.End()
	endPart()
	n.noLeftovers()
}

// TestLoopDeviceOverAMountedDevice: a loop device does not keep the device under it from being mounted.
func TestLoopDeviceOverAMountedDevice(t *testing.T) {
	n := parallelNode(t)
	disk := rig.Disk(t, 32*mib, "ext4")
	upper := rig.Loop(t, rig.Loop(t, disk, loopdev.Options{}), loopdev.Options{})
	point := t.TempDir()
	check.Must(t, unix.Mount(disk, point, "ext4", 0, ""))
	_, err := n.Defer(t.Context(), n.instruction("pod-1", upper))
	check.Must(t, unix.Unmount(point, 0))
	check.Kind(t, err, volume.InUse, disk)
	n.stage(n.instruction("pod-1", upper))
	check.Kind(t, check.Err(n.Defer(t.Context(), n.instruction("pod-2", disk))), volume.InUse)
	n.unstage(n.target("pod-1"))

	// Read-only volumes share it.
	n.stage(n.instruction("pod-2", upper, "ro"))
	n.stage(n.instruction("pod-1", disk, "ro"))
	n.unstage(n.target("pod-1"))
	wantReadOnly(t, disk, false)
	n.unstage(n.target("pod-2"))
	n.noLeftovers()
}
