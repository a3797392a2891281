//go:build system

package broker

import (
	"errors"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// hostRuntime is a handler whose sandboxes' mounts this node's kernel makes.
type hostRuntime struct{ fakeRuntime }

func (*hostRuntime) Name() string                  { return "host" }
func (*hostRuntime) Abilities() deferral.Abilities { return deferral.Abilities{HostMounts: true} }

// newMountingNode has both kinds of handler.
func newMountingNode(t *testing.T) *node {
	t.Helper()
	n := newNode(t)
	n.mounting = &hostRuntime{}
	n.cfg.Handlers = append(n.cfg.Handlers, n.mounting)
	n.restart()
	return n
}

func (n *node) forHost(pod, device string, flags ...string) volume.Instruction {
	in := n.instruction(pod, device, flags...)
	in.Handler = "host"
	return in
}

// mountAway mounts a device in a namespace of its own until end is called, as a sandbox does.
func mountAway(t *testing.T, disk string) (end func()) {
	t.Helper()
	holder := inOtherNamespace("sh", "-c", `mount "$0" "$1" && echo mounted && cat`, disk, t.TempDir())
	stdin := check.Value(holder.StdinPipe())(t)
	stdout := check.Value(holder.StdoutPipe())(t)
	check.Must(t, holder.Start())
	end = sync.OnceFunc(func() { check.NoError(t, errors.Join(stdin.Close(), holder.Wait()), "the holder") })
	t.Cleanup(end)
	check.Must(t, check.Err(stdout.Read(make([]byte, 16))))
	return end
}

// TestDeviceOfAMountingHandlerCanBeMounted, and its claim is taken up while it is.
func TestDeviceOfAMountingHandlerCanBeMounted(t *testing.T) {
	t.Parallel()
	n := newMountingNode(t)
	disk := rig.Disk(t, 32*mib, "ext4")
	v := n.stage(n.forHost("pod-1", disk))
	end := mountAway(t, disk)

	size, ok := n.DeviceSize(v)
	check.That(t, ok && size == 32*mib, "the device's size is %d, %v", size, ok)
	n.stage(n.forHost("pod-1", disk)) // kubelet's call comes again after its restart
	for _, in := range []volume.Instruction{n.forHost("pod-2", disk), n.instruction("pod-2", disk)} {
		check.Kind(t, check.Err(n.Defer(t.Context(), in)), volume.InUse)
	}
	n.restart()
	for known := range n.Each() {
		check.That(t, known.Problem == nil, "%s: %v", known.Target, known.Problem)
	}
	check.Kind(t, check.Err(n.Defer(t.Context(), n.forHost("pod-2", disk))), volume.InUse, v.Target)
	second := rig.Loop(t, rig.Image(t, 16*mib), loopdev.Options{})
	n.stage(n.forHost("pod-2", second))
	end()
	n.unstage(v.Target)
	n.unstage(n.target("pod-2"))
	n.noLeftovers()
}

func TestReadOnlyVolumesOfMountingHandlers(t *testing.T) {
	t.Parallel()
	n := newMountingNode(t)
	disk := rig.Disk(t, 32*mib, "ext4")
	n.stage(n.forHost("pod-1", disk, "noatime,ro")) // all options as one flag
	wantReadOnly(t, disk, true)
	point := t.TempDir()
	check.Must(t, unix.Mount(disk, point, "ext4", unix.MS_RDONLY, ""))
	t.Cleanup(func() { _ = unix.Unmount(point, unix.MNT_DETACH) })
	n.stage(n.forHost("pod-2", disk, "ro")) // read-only beside read-only, mounted or not
	check.Kind(t, check.Err(n.Defer(t.Context(), n.instruction("pod-3", disk, "ro"))), volume.InUse)
	n.restart()
	wantReadOnly(t, disk, true)
	n.unstage(n.target("pod-1")) // the other's sandbox may go on
	check.Must(t, unix.Unmount(point, 0))
	n.unstage(n.target("pod-2"))
	wantReadOnly(t, disk, false)

	n.stage(n.instruction("pod-3", disk, "ro"))
	check.Kind(t, check.Err(n.Defer(t.Context(), n.forHost("pod-1", disk, "ro"))), volume.InUse)
	n.unstage(n.target("pod-3"))
	n.noLeftovers()
}
