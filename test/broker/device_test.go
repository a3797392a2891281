//go:build system

package broker

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

const mib = 1 << 20

func TestSecondOwnerIsRefusedWhateverTheDeviceIsCalled(t *testing.T) {
	n := parallelNode(t)
	disk := rig.Disk(t, 16*mib, "")
	first := n.stage(n.instruction("pod-1", disk))

	link := filepath.Join(n.kubelet, "link")
	check.Must(t, unix.Mknod(link, unix.S_IFBLK|0o600, rdev(t, disk)))
	for _, device := range []string{disk, link} { // the same name, and another node
		check.Kind(t, check.Err(n.Defer(t.Context(), n.instruction("pod-2", device))), volume.InUse, first.Target)
	}
	n.restart()
	check.Kind(t, check.Err(n.Defer(t.Context(), n.instruction("pod-2", disk))), volume.InUse)
	n.unstage(first.Target)
	n.stage(n.instruction("pod-2", disk))
	n.unstage(n.target("pod-2"))
	n.noLeftovers()
}

func rdev(t *testing.T, device string) int {
	t.Helper()
	var st unix.Stat_t
	check.Must(t, unix.Stat(device, &st))
	return int(st.Rdev)
}

func TestImageFiles(t *testing.T) {
	n := parallelNode(t)
	image := filepath.Join(n.images, "disk a+b%20&.img")
	check.Must(t, os.WriteFile(image, make([]byte, mib), 0o600))
	v := n.stage(n.instruction("pod-1", image))
	check.That(t, v.Device.Kind == volume.ImageFile && v.Device.Path == image, "device is %+v", v.Device)
	check.Must(t, os.Link(image, image+".2"))
	_, err := n.Defer(t.Context(), n.instruction("pod-2", image+".2"))
	check.Kind(t, err, volume.InUse)
	owned, is := errors.AsType[*claim.OwnedError](err)
	check.That(t, is && owned.Target == v.Target && strings.Contains(err.Error(), "belongs to volume "+v.Target), "the owner is %+v: %v", owned, err)
	n.unstage(v.Target)

	loop := rig.Loop(t, image, loopdev.Options{})
	check.Kind(t, check.Err(n.Defer(t.Context(), n.instruction("pod-2", image))), volume.InUse, loop)
	check.Kind(t, check.Err(n.Defer(t.Context(), n.instruction("pod-2", image, "ro"))), volume.Unsupported)
	n.noLeftovers()
}

// TestImagesBelowARootOfDevices: a driver keeps its images where its devices may lie too.
func TestImagesBelowARootOfDevices(t *testing.T) {
	n := parallelNode(t)
	images := filepath.Join(n.kubelet, "images")
	check.Must(t, os.Mkdir(images, 0o755))
	policy := n.cfg.Devices
	policy.Images = []string{images}
	n.SetDevices(policy)
	image, device := filepath.Join(images, "disk.img"), filepath.Join(images, "link")
	check.Must(t, os.WriteFile(image, make([]byte, mib), 0o600))
	check.Must(t, unix.Mknod(filepath.Join(n.kubelet, "disk"), unix.S_IFBLK|0o600, rdev(t, rig.Disk(t, 16*mib, ""))))
	check.Must(t, os.Symlink("../disk", device))
	for _, backing := range []string{image, device} {
		n.stage(n.instruction("pod-1", backing))
		n.unstage(n.target("pod-1"))
	}
	n.noLeftovers()
}

func TestClaimedDeviceCannotBeMountedInAnotherNamespace(t *testing.T) {
	n := parallelNode(t)
	disk := rig.Disk(t, 32*mib, "ext4")
	n.stage(n.instruction("pod-1", disk))
	point := t.TempDir()
	out, err := inOtherNamespace("mount", disk, point).CombinedOutput()
	check.That(t, err != nil && (strings.Contains(strings.ToLower(string(out)), "busy") || strings.Contains(string(out), "already mounted")),
		"mounting a claimed device elsewhere: %v\n%s", err, out)
	// A VMM opens it plainly, read-write.
	check.Must(t, unix.Close(check.Value(unix.Open(disk, unix.O_RDWR, 0))(t)))
	n.unstage(n.target("pod-1"))
	out, err = inOtherNamespace("mount", disk, point).CombinedOutput()
	check.That(t, err == nil, "mounting it after unstage: %v\n%s", err, out)
	n.noLeftovers()
}

// inOtherNamespace runs a program whose mounts nobody else sees.
func inOtherNamespace(program string, args ...string) *exec.Cmd {
	cmd := exec.Command(program, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	return cmd
}

func TestDeviceMountedElsewhereIsRefused(t *testing.T) {
	n := parallelNode(t)
	disk := rig.Disk(t, 32*mib, "ext4")
	end := mountAway(t, disk)
	check.Kind(t, check.Err(n.Defer(t.Context(), n.instruction("pod-1", disk))), volume.InUse)
	end()

	point := t.TempDir()
	check.Must(t, unix.Mount(disk, point, "ext4", 0, ""))
	check.Kind(t, check.Err(n.Defer(t.Context(), n.instruction("pod-1", disk))), volume.InUse, point)
	check.Must(t, unix.Unmount(point, 0))
	n.stage(n.instruction("pod-1", disk))
	n.unstage(n.target("pod-1"))
	n.noLeftovers()
}

func TestReadOnlyIsEnforcedAtTheDevice(t *testing.T) {
	n := parallelNode(t)
	disk := rig.Disk(t, 16*mib, "")
	n.stage(n.instruction("pod-1", disk, "ro"))
	n.stage(n.instruction("pod-2", disk, "ro")) // read-only beside read-only is fine
	wantReadOnly(t, disk, true)
	check.Kind(t, check.Err(n.Defer(t.Context(), n.instruction("pod-3", disk))), volume.InUse)
	n.restart()
	wantReadOnly(t, disk, true)
	n.unstage(n.target("pod-1"))
	wantReadOnly(t, disk, true)
	n.unstage(n.target("pod-2"))
	wantReadOnly(t, disk, false)
	n.noLeftovers()
}

func TestReadOnlyStateIsPutBackAsItWas(t *testing.T) {
	n := parallelNode(t)
	disk := rig.Loop(t, rig.Image(t, 16*mib), loopdev.Options{ReadOnly: true})
	check.Kind(t, check.Err(n.Defer(t.Context(), n.instruction("pod-1", disk))), volume.Invalid)
	n.stage(n.instruction("pod-1", disk, "ro"))
	n.restart()
	n.unstage(n.target("pod-1"))
	wantReadOnly(t, disk, true)
	n.noLeftovers()
}

// TestDeviceThatTurnedReadOnly by an error is claimed again for its volume, whose sandbox may have it.
func TestDeviceThatTurnedReadOnly(t *testing.T) {
	n := parallelNode(t)
	disk := rig.Disk(t, 16*mib, "")
	v := n.stage(n.instruction("pod-1", disk))
	rig.Command(t, "blockdev", "--setro", disk)
	n.restart()
	status, _ := n.Get(v.Key)
	check.Is(t, rig.Exclusive(disk), unix.EBUSY)
	check.That(t, status.Problem == nil && n.runtime.published[v.Key], "the volume is shown with %v", status.Problem)
	n.unstage(v.Target)
	wantReadOnly(t, disk, true)
	n.noLeftovers()
}

// wantReadOnly opens the device directly, as a program on the host would.
func wantReadOnly(t *testing.T, device string, want bool) {
	t.Helper()
	err := rig.TryWrite(device)
	check.That(t, (err != nil) == want, "writing to %s: %v; want read-only: %v", device, err, want)
}

// TestWrongDevices: claim.TestDevicesThatMayBeHandedOver has more of them.
func TestWrongDevices(t *testing.T) {
	n := newNode(t)
	check.Must(t, os.Symlink("/dev/loop0", filepath.Join(n.kubelet, "to-dev")))
	for device, want := range map[string]volume.Kind{
		"/dev/null": volume.Invalid, filepath.Join(n.kubelet, "to-dev"): volume.Denied, "/etc/passwd": volume.Denied, emptyLoop(t): volume.NotFound,
	} {
		_, err := n.Defer(t.Context(), n.instruction("pod-1", device))
		check.That(t, err != nil && volume.KindOf(err) == want, "%s: got %v; want %v", device, err, want)
	}
	n.SetDevices(claim.DevicePolicy{Roots: []string{"/dev"}, Classes: []string{"nvme"}})
	check.Kind(t, check.Err(n.Defer(t.Context(), n.instruction("pod-1", rig.Disk(t, 16*mib, "")))), volume.Denied)
	n.noLeftovers()
}

// emptyLoop is a loop device with nothing behind it, or one that does not exist.
func emptyLoop(t *testing.T) string {
	t.Helper()
	path := check.Value(loopdev.Attach(rig.Image(t, mib), loopdev.Options{}))(t)
	check.Must(t, loopdev.Detach(path))
	return path
}

// TestDeviceSwappedBetweenCheckAndUse renames two devices over one name as fast
// as it can: whatever is claimed must be what is handed over.
func TestDeviceSwappedBetweenCheckAndUse(t *testing.T) {
	n := newNode(t)
	disks := []string{rig.Disk(t, 16*mib, ""), rig.Disk(t, 16*mib, "")}
	name := filepath.Join(n.kubelet, "disk")
	check.Must(t, unix.Mknod(name, unix.S_IFBLK|0o600, rdev(t, disks[0])))
	ctx, cancel := context.WithCancel(t.Context())
	var swapping sync.WaitGroup
	swapping.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			next := name + ".next"
			_ = unix.Mknod(next, unix.S_IFBLK|0o600, rdevOf(disks[i%2]))
			_ = os.Rename(next, name)
		}
	})
	for range 300 {
		v := check.Value(n.Defer(ctx, n.instruction("pod-1", name)))(t)
		got := rdev(t, v.Device.Path)
		check.Require(t, got == int(unix.Mkdev(v.Device.Major, v.Device.Minor)), "handed over %s, which is not the claimed %s", v.Device.Path, v.Device)
		fd, err := unix.Open(v.Device.Path, unix.O_RDONLY|unix.O_EXCL, 0)
		if !errors.Is(err, unix.EBUSY) {
			_ = unix.Close(fd)
			t.Fatalf("the device that is handed over is not the one that is held: %v", err)
		}
		n.unstage(v.Target)
	}
	cancel()
	swapping.Wait()
	n.noLeftovers()
}

func rdevOf(device string) int {
	var st unix.Stat_t
	if unix.Stat(device, &st) != nil {
		return 0
	}
	return int(st.Rdev)
}
