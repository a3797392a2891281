//go:build system

package package_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/health/grpc_health_v1"

	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

const target = "/var/lib/kubelet/pods/0c5e6f3a-7d1b-4c58-9a59-2f0a3f6a2f11/volumes/kubernetes.io~csi/pv/mount"

// TestService installs the .deb where systemd runs: a bad configuration is no outage, and a volume
// outlives a removal of which somebody insists. TestNode has the rest.
func TestService(t *testing.T) {
	device := rig.Disk(t, 64<<20, "ext4")
	s := install(t, device)
	s.device, s.target = device, target
	check.Must(t, os.MkdirAll(s.path(filepath.Dir(target)), 0o750))
	s.stage()
	s.testSandboxing()
	s.testMasked()
	s.testBadConfiguration()
	s.testRemovedUnderVolume()
	s.unstage()
	s.run("dpkg", "--purge", name)
	check.Is(t, check.Err(os.Stat(s.path("/run/crust-proxy"))), os.ErrNotExist) // after a purge
}

// service is the installed service and the volume that is looked at.
type service struct {
	*machine
	device string // seen from here
	target string // seen from the machine
}

// install boots a machine and installs the daemon's .deb in it.
func install(t *testing.T, devices ...string) *service {
	t.Helper()
	s := &service{machine: boot(t, devices...)}
	s.run("dpkg", "-i", s.bring(rig.Package(t, name, "deb")))
	return s
}

func (s *service) stage() {
	s.t.Helper()
	_, err := runtimev1.NewRuntimeClient(s.dial("/run/crust-proxy/runtime.sock")).RuntimeStageVolume(check.Within(s.t, 2*time.Minute), &runtimev1.RuntimeStageVolumeRequest{
		VolumeType:        &runtimev1.VolumeType{Type: runtimev1.VolumeType_BLOCK},
		VolumeTargetPath:  target,
		VolumeBackingPath: s.device,
		FsType:            "ext4",
	})
	check.Require(s.t, err == nil, "stage: %v", err)
	s.wantVolume()
}

func (s *service) unstage() {
	s.t.Helper()
	ctx := check.Within(s.t, 2*time.Minute)
	_, err := runtimev1.NewRuntimeClient(s.dial("/run/crust-proxy/runtime.sock")).RuntimeUnstageVolume(ctx, &runtimev1.RuntimeUnstageVolumeRequest{VolumeTargetPath: target})
	check.Require(s.t, err == nil, "unstage: %v", err)
	check.That(s.t, !s.guarded(), "the guard is still there after unstage")
	check.NoError(s.t, rig.Exclusive(s.device), "the device is still held after unstage")
}

// wantVolume wants the guard where systemd, and so kubelet, sees it, and the device held.
func (s *service) wantVolume() {
	s.t.Helper()
	check.That(s.t, s.guarded(), "the guard cannot be seen outside of the service")
	check.Is(s.t, rig.Exclusive(s.device), unix.EBUSY) // taking the claimed device
}

func (s *service) guarded() bool {
	s.t.Helper()
	raw := check.Value(os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", s.init)))(s.t)
	for line := range strings.SplitSeq(string(raw), "\n") {
		if strings.Contains(line, " "+s.target+" ") && strings.Contains(line, " - tmpfs crust:") {
			return true
		}
	}
	return false
}

func (s *service) testSandboxing() {
	s.t.Helper()
	pid := s.property("MainPID")
	own, host := s.run("readlink", "/proc/"+pid+"/ns/mnt"), s.run("readlink", "/proc/1/ns/mnt")
	check.That(s.t, own == host, "the service has a mount namespace of its own: %s, the host's is %s", own, host)
	status := s.run("cat", "/proc/"+pid+"/status")
	for _, want := range []string{
		"NoNewPrivs:\t1", "Seccomp:\t2",
		"CapEff:\t000000000020020a", // DAC_OVERRIDE, FOWNER, LINUX_IMMUTABLE, SYS_ADMIN
	} {
		check.That(s.t, strings.Contains(status, want), "the service's status has no %q", want)
	}
}

// kill kills the daemon and returns when another one runs.
func (s *service) kill() {
	before := s.property("MainPID")
	s.run("kill", "-9", before)
	s.wait("start the killed daemon again", func() bool {
		pid := s.property("MainPID")
		return pid != before && pid != "0" && s.property("ActiveState") == "active"
	})
}

// call makes one call on a connection of its own.
func (s *service) call() error {
	conn, err := rig.Connect(s.path("/run/crust-proxy/admin.sock"), waitForDaemon)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	_, err = grpc_health_v1.NewHealthClient(conn).Check(check.Within(s.t, time.Minute), &grpc_health_v1.HealthCheckRequest{})
	return err
}

// testRemovedUnderVolume tries to remove the package while a volume lives: that is refused with its name. Where
// somebody insists, the volume stays as it is and is found when the package is installed again.
func (s *service) testRemovedUnderVolume() {
	s.t.Helper()
	out, err := s.command("dpkg", "--remove", name).CombinedOutput()
	said := string(out)
	check.That(s.t, err != nil && strings.Contains(said, target) && strings.Contains(said, "CRUST_PROXY_ABANDON_VOLUMES=1"),
		"removal under a live volume: %v\n%s", err, said)
	said = s.run("env", "CRUST_PROXY_ABANDON_VOLUMES=1", "dpkg", "--remove", name)
	check.That(s.t, strings.Contains(said, target), "removal of which somebody insists does not name the volume:\n%s", said)
	check.That(s.t, s.guarded(), "removal took the guard of a living volume")
	s.run("dpkg", "-i", s.bring(rig.Package(s.t, name, "deb")))
	s.wait("start the daemon again", func() bool { return s.property("ActiveState") == "active" })
}

// testMasked upgrades under a unit that an operator has masked: dpkg succeeds, and the daemon stays.
func (s *service) testMasked() {
	s.t.Helper()
	pid := s.property("MainPID")
	s.run("systemctl", "mask", "crust-proxy.service")
	s.run("dpkg", "-i", s.bring(rig.Package(s.t, name, "deb")))
	check.That(s.t, s.property("MainPID") == pid, "an upgrade restarted a masked unit")
	s.run("systemctl", "unmask", "crust-proxy.service")
}

// testBadConfiguration spoils the file: neither a reload, nor an upgrade, nor a kill takes the daemon from the volume.
func (s *service) testBadConfiguration() {
	s.t.Helper()
	good := check.Value(os.ReadFile(s.path(config)))(s.t)
	write := func(text string) { check.Must(s.t, os.WriteFile(s.path(config), []byte(text), 0o644)) }
	write("no-such-key: 1\n")
	pid := s.property("MainPID")
	out, err := s.command("systemctl", "reload", "crust-proxy").CombinedOutput()
	check.That(s.t, err != nil, "a bad file was reloaded: %s", out)
	s.run("journalctl", "--sync")
	check.Says(s.t, "systemctl status", s.run("systemctl", "status", "--no-pager", "crust-proxy"), "no-such-key")
	said := s.run("dpkg", "-i", s.bring(rig.Package(s.t, name, "deb")))
	check.Equal(s.t, s.run("dpkg-query", "--show", "--showformat=${Status}", name), "install ok installed", "after an upgrade the package is")
	now := s.property("MainPID")
	check.That(s.t, now == pid && strings.Contains(said, "no-such-key") && strings.Contains(said, "systemctl restart"),
		"the upgrade replaced daemon %s by %s, and says:\n%s", pid, now, said)
	for _, text := range []string{"no-such-key: 1\n", "front: {enabled: true, registry: /proc/no}\n"} {
		write(text)
		s.kill()
		check.Must(s.t, s.call())
		s.wantVolume()
		said := s.run("crustctl", "version")
		check.That(s.t, strings.Contains(said, "is bad since") && strings.Contains(said, "was accepted at"),
			"with %q crustctl version says:\n%s", text, said)
	}
	write(string(good))
	s.run("systemctl", "reload", "crust-proxy")
	s.wait("take the mended file", func() bool { return !strings.Contains(s.run("crustctl", "version"), "is bad since") })
	s.run("dpkg", "-i", s.bring(rig.Package(s.t, name, "deb")))
	check.That(s.t, s.property("MainPID") != pid, "an upgrade with a good file did not restart the daemon")
	s.wantVolume()
}
