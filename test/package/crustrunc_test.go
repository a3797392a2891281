//go:build system

package package_test

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// TestProgramWithinTheUnit has the packaged service ask crust-runc about a volume:
// what the program needs has to be possible within what the unit and its drop-in
// allow.
func TestProgramWithinTheUnit(t *testing.T) {
	device := rig.Disk(t, 64<<20, "ext4")
	s := install(t, device)
	s.run("dpkg", "-i", s.bring(packageOf(t, "crust-runtimes", "deb")))
	s.device, s.target = device, target
	check.Must(t, os.MkdirAll(s.path(filepath.Dir(target)), 0o750))
	check.Must(t, os.WriteFile(s.path(config), []byte("handlers: {default: crust, crust: {enabled: true}}\n"), 0o600))
	s.killOnRefusal()
	s.run("systemctl", "start", "crust-proxy.service")
	s.askStage()
	s.startSandbox()

	s.run("cp", "/usr/share/crust-proxy/crust-runc.conf", "/etc/systemd/system/crust-proxy.service.d/")
	s.run("systemctl", "daemon-reload")
	s.run("systemctl", "restart", "crust-proxy.service")
	if said := s.run("crustctl", "stats", target); !strings.Contains(said, "Sandbox:     sandbox-1") || !strings.Contains(said, "normal") {
		t.Errorf("with the drop-in:\n%s", said)
	}
	s.run("crustctl", "freeze", target, "--for", "30s")
	s.run("crustctl", "thaw", target)
	s.run("systemctl", "stop", "sandbox.service")
	s.unstage()
}

// startSandbox has a process with a mount namespace of its own that mounts the
// volume, as crust-runc does in the process of a sandbox, and more rights than the
// service.
func (s *service) startSandbox() {
	s.t.Helper()
	key := abi.DirName(target)
	point := "/dev/crust/" + key
	s.run("systemd-run", "--unit=sandbox", "unshare", "--mount", "--propagation=private", "sh", "-c",
		"mkdir -p "+point+" && mount -t ext4 "+s.device+" "+point+" && exec sleep 1000")
	pid := s.run("systemctl", "show", "--value", "--property=MainPID", "sandbox.service")
	s.wait("mount the volume in the sandbox", func() bool {
		raw, _ := os.ReadFile(s.path("/proc/" + pid + "/mountinfo"))
		return strings.Contains(string(raw), point)
	})
	stat := s.run("cat", "/proc/"+pid+"/stat")
	start := strings.Fields(stat[strings.LastIndex(stat, ")")+1:])[19]
	number, err := strconv.Atoi(pid)
	check.Must(s.t, err)
	for name, content := range map[string]string{
		"sandbox-1": `{"pid":` + strconv.Itoa(number) + `,"start":` + start + `}`, abi.CLIName: "/usr/bin/crust-runc\n",
	} {
		check.Must(s.t, os.WriteFile(s.path("/run/crust/"+key+"/"+name), []byte(content), 0o600))
	}
}
