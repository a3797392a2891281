//go:build system

package package_test

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/csivolume"
)

const (
	driverData = "/var/lib/crust-package-test-volumes"
	// Calls under way are broken off soon: the test stops the service under one.
	frontConfig = "front: {enabled: true}\npolicy: {rules: [{name: all, defer: true}]}\nshutdownTimeout: 500ms\n"
)

// frontService is the service with its front, a driver behind it.
type frontService struct {
	*service
	driver *csivolume.Client
}

// TestFront takes volumes through the front of the packaged service: all that it
// does for them has to be possible within what the unit allows.
func TestFront(t *testing.T) {
	rig.Need(t, "blkid", "mkfs.ext4", "mkfs.xfs", "mkfs.btrfs")
	t.Cleanup(func() { detachAll(t); removeDeviceGroup(t) })
	f := startFront(t)
	f.enforceDevices()
	f.register()

	var volumes []*volume
	for _, fsType := range []string{"xfs", "btrfs"} {
		v := f.create(fsType)
		v.Publish()
		volumes = append(volumes, v)
		f.wantHandedOver(v)
	}
	last := f.create("ext4")
	check.Must(t, last.Stage())
	f.testStopDuringMkfs(last)
	volumes = append(volumes, last)
	f.testRestart(volumes)
	for _, v := range volumes {
		v.Unpublish()
		v.Delete()
	}
	f.wantNothingLeft()
}

// startFront starts the service and the driver; neither waits for the other.
func startFront(t *testing.T) *frontService {
	t.Helper()
	driver := check.Value(os.ReadFile(rig.Program(t, "crust-driver")))(t)
	f := &frontService{service: install(t, "/dev/loop-control")}
	f.makeLoopNodes()
	for _, dir := range []string{pluginDir, driverData, kubeletRoot + "/plugins/" + driverName} {
		check.Must(t, os.MkdirAll(f.path(dir), 0o750))
	}
	check.Must(t, os.WriteFile(f.path(config), []byte(frontConfig), 0o600))
	check.Must(t, os.WriteFile(f.path("/root/crust-driver"), driver, 0o700))
	f.killOnRefusal()
	f.run("systemctl", "restart", "crust-proxy.service")
	const socket = kubeletRoot + "/plugins/" + driverName + "/csi.sock"
	f.run("systemd-run", "--unit=crust-driver", "/root/crust-driver", "--endpoint=unix://"+socket,
		"--data-dir="+driverData, "--node-id=node-1", "--capacity=100000000000", "--kubelet-endpoint="+socket,
		"--kubelet-registration-socket="+kubeletRoot+"/crust-proxy/registry/"+driverName+"-reg.sock")
	f.driver = csivolume.NewClient(f.dial(csiSocket), driverName, kubeletRoot)
	f.driver.Host = f.path("")
	return f
}

// killOnRefusal has the unit's filter kill whoever makes a system call that it
// refuses. The error that it gives otherwise may go unnoticed, by an mkfs say.
func (f *machine) killOnRefusal() {
	f.t.Helper()
	dir := f.path("/etc/systemd/system/crust-proxy.service.d")
	check.Must(f.t, os.MkdirAll(dir, 0o755)) //nolint:gosec // systemd warns of other modes
	check.Must(f.t, os.WriteFile(filepath.Join(dir, "kill.conf"), []byte("[Service]\nSystemCallErrorNumber=kill\n"), 0o600))
	f.run("systemctl", "daemon-reload")
}

// makeLoopNodes makes what the kernel does not make in the machine's own /dev.
func (f *frontService) makeLoopNodes() {
	f.t.Helper()
	const loopMajor, enough = 7, 128
	for minor := range uint32(enough) {
		path := f.path("/dev/loop" + strconv.Itoa(int(minor)))
		check.Must(f.t, unix.Mknod(path, unix.S_IFBLK|0o600, int(unix.Mkdev(loopMajor, minor))))
	}
}

// look takes a volume for the one that is looked at.
func (f *frontService) look(v *volume) string {
	f.t.Helper()
	device := f.handedOver(v)
	f.device, f.target = f.path(device), v.Target
	return device
}

// wantHandedOver wants the volume formatted, guarded and claimed.
func (f *frontService) wantHandedOver(v *volume) {
	f.t.Helper()
	device := f.look(v)
	got := f.run("blkid", "-p", "-o", "value", "-s", "TYPE", device)
	check.That(f.t, got == v.FS, "%s holds %q, want %s", device, got, v.FS)
	f.wantVolume()
}

// testStopDuringMkfs stops the service while mkfs runs: the filesystem is
// finished all the same, and nobody is given the device before.
func (f *frontService) testStopDuringMkfs(v *volume) {
	f.t.Helper()
	f.slowMkfs()
	ended := check.Begin(v.TryPublish)
	f.wait("run mkfs", func() bool { return f.mkfsPid() != "0" })
	pid := f.mkfsPid()
	capabilities := f.run("grep", "Cap[PE]", "/proc/"+pid+"/status")
	check.That(f.t, strings.Count(capabilities, "\t0000000000000000") == 2, "mkfs has capabilities:\n%s", capabilities)
	f.run("systemctl", "stop", "crust-proxy.service")
	err := <-ended
	check.That(f.t, status.Code(err) == codes.Unavailable, "the service was stopped under a publish, which gave %v", err)
	check.Says(f.t, "the control group of mkfs", f.run("cat", "/proc/"+pid+"/cgroup"), "crust-proxy.service")
	f.wantSockets()
	f.run("systemctl", "start", "crust-proxy.service")
	f.waitServed()
	check.Code(f.t, v.TryPublish(), codes.Aborted)   // a publish while mkfs still runs
	check.Code(f.t, v.TryUnpublish(), codes.Aborted) // an unpublish while mkfs still runs
	f.run("touch", "/run/mkfs-go")
	f.wait("end mkfs", func() bool { return f.command("kill", "-0", pid).Run() != nil })
	check.Retried(f.t, "publish", v.TryPublish)
	f.wantHandedOver(v)
	check.Equal(f.t, f.mkfsPid(), pid, "the process of mkfs")
}

// mkfsPid is the last mkfs: it can write to no file, but it can set the times of one.
func (f *frontService) mkfsPid() string {
	f.t.Helper()
	return f.run("stat", "--format=%Y", "/run/mkfs-pid")
}

// slowMkfs has mkfs.ext4 wait until it is let go.
func (f *frontService) slowMkfs() {
	f.t.Helper()
	const script = `#!/bin/sh
touch -c -d @$$ /run/mkfs-pid
until [ -e /run/mkfs-go ]; do sleep 0.02; done
exec mke2fs -t ext4 "$@"
`
	f.run("touch", "-d", "@0", "/run/mkfs-pid")
	path := f.run("sh", "-c", "command -v mkfs.ext4") // a link to mke2fs
	check.Must(f.t, os.Remove(f.path(path)))
	check.Must(f.t, os.WriteFile(f.path(path), []byte(script), 0o755)) //nolint:gosec // a program
}

// wantSockets wants both sockets of the driver there: kubelet deregisters a driver whose socket goes.
func (f *frontService) wantSockets() {
	f.t.Helper()
	found, err := filepath.Glob(f.path(pluginDir) + "/*.sock")
	check.That(f.t, err == nil && len(found) == 1, "for kubelet there are the sockets %q (%v), want one", found, err)
	_, err = os.Stat(f.path(csiSocket))
	check.That(f.t, err == nil, "%v", err)
}

// waitServed waits until the driver answers through the front.
func (f *frontService) waitServed() {
	f.t.Helper()
	f.driver.Wait(f.t)
}

// testRestart wants the claims held after a restart, and the driver served.
func (f *frontService) testRestart(volumes []*volume) {
	f.t.Helper()
	f.run("systemctl", "restart", "crust-proxy.service")
	f.wantSockets()
	f.waitServed()
	f.enforceDevices()
	f.register()
	for _, v := range volumes {
		f.wantHandedOver(v)
		check.Retried(f.t, "publish", v.TryPublish) // as kubelet repeats it
	}
	kept := f.property("NFileDescriptorStore")
	check.That(f.t, kept == strconv.Itoa(len(volumes)), "systemd keeps %s descriptors for %d volumes", kept, len(volumes))
	loops := loopsOf(driverData)
	check.That(f.t, len(loops) == len(volumes), "the driver has the loop devices %q for %d volumes", loops, len(volumes))
	check.Says(f.t, "crustctl drivers", f.run("crustctl", "drivers"), driverName)
}

func (f *frontService) wantNothingLeft() {
	f.t.Helper()
	kept := f.property("NFileDescriptorStore")
	check.That(f.t, kept == "0", "systemd still keeps %s descriptors", kept)
	raw := f.run("cat", "/proc/self/mountinfo")
	check.That(f.t, !strings.Contains(raw, " "+kubeletRoot), "mounted below %s:\n%s", kubeletRoot, raw)
	left := f.run("find", kubeletRoot+"/plugins/kubernetes.io/csi/volumeDevices", "/run/crust-proxy/state", kataVolumes, driverData, "-type", "f",
		"!", "-path", driverData+"/probe", "!", "-path", driverData+"/driver.lock", "!", "-path", driverData+"/spare", // the driver's own
		"!", "-path", "/run/crust-proxy/state/events.pb") // what happened to them
	check.That(f.t, left == "", "left behind:\n%s", left)
	check.Empty(f.t, rig.LoopsLeft(driverData+"/"), "loop devices left behind")
}

// loopsOf lists the loop devices over files of a directory of the machine.
func loopsOf(dir string) []string { return slices.Collect(maps.Keys(rig.Loops(dir + "/"))) }

// detachAll frees what a failed test leaves.
func detachAll(t *testing.T) {
	t.Helper()
	for _, loop := range loopsOf(driverData) {
		check.Must(t, loopdev.Detach(loop))
	}
}
