//go:build system

package package_test

import (
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// TestProgramWithinTheUnit has the packaged service ask crust-runc about a volume:
// what the program needs has to be possible within what the unit and its drop-in
// allow. The volume comes and goes by the commands of docs/quick-start.md, as they stand there.
func TestProgramWithinTheUnit(t *testing.T) {
	device := rig.Disk(t, 512<<20, "xfs")
	s := install(t, device)
	s.run("dpkg", "-i", s.bring(rig.Package(t, "crust-runtimes", "deb")))
	s.device, s.target = device, "/var/lib/kubelet/pods/11111111-2222-4333-8444-555555555555/volumes/kubernetes.io~csi/demo/mount"
	commands := quickStart(t, device)
	unpublish := commands[3]
	check.Must(t, os.WriteFile(s.path(config), []byte("handlers: {default: crust, crust: {enabled: true}}\n"), 0o600))
	s.killOnRefusal()
	s.run("systemctl", "start", "crust-proxy.service")
	s.run("sh", "-c", commands[0])
	if said := s.run("sh", "-c", commands[1]); !s.guarded() || !strings.Contains(said, "\n11111111   demo     PUBLISHED") {
		t.Errorf("the list, with a guard: %v\n%s", s.guarded(), said)
	}
	s.startSandbox()

	s.run("cp", "/usr/share/crust-proxy/crust-runc.conf", "/etc/systemd/system/crust-proxy.service.d/")
	s.run("systemctl", "daemon-reload")
	s.run("systemctl", "restart", "crust-proxy.service")
	if said := s.run("sh", "-c", commands[2]); !strings.Contains(said, "Sandbox:     sandbox-1") || !strings.Contains(said, "normal") {
		t.Errorf("with the drop-in:\n%s", said)
	}
	s.run("crustctl", "freeze", "demo", "--for", "30s")
	s.run("crustctl", "thaw", "demo")
	if said, err := s.command("sh", "-c", unpublish).CombinedOutput(); err == nil || !strings.Contains(string(said), "has not ended") {
		t.Errorf("while the sandbox lives: %v\n%s", err, said)
	}
	s.run("systemctl", "stop", "sandbox.service")
	s.run("sh", "-c", unpublish)
	check.That(t, !s.guarded(), "the guard is left")
}

// quickStart returns the commands of crustctl in the section without a cluster, each with the
// variables that it needs: publish, list, stats, and unpublish twice.
func quickStart(t *testing.T, disk string) (commands []string) {
	t.Helper()
	raw, err := os.ReadFile("../../docs/quick-start.md")
	check.Must(t, err)
	_, section, _ := strings.Cut(string(raw), "\n## One node, no cluster\n")
	section, _, _ = strings.Cut(section, "\n## ")
	variables := "disk=" + disk + "\n"
	for line := range strings.Lines(section) {
		command, is := strings.CutPrefix(line, "$ ")
		switch {
		case !is || strings.HasPrefix(command, "crustctl doctor"):
		case strings.HasPrefix(command, "pod="), strings.HasPrefix(command, "target="):
			variables += command
		case strings.HasPrefix(command, "crustctl "):
			commands = append(commands, variables+command)
		}
	}
	if len(commands) != 5 || commands[3] != commands[4] {
		t.Fatalf("the page has the commands %q", commands)
	}
	return commands
}

// startSandbox has a process with a mount namespace of its own that mounts the
// volume, as crust-runc does in the process of a sandbox, and more rights than the
// service.
func (s *service) startSandbox() {
	s.t.Helper()
	key := abi.DirName(s.target)
	point := "/dev/crust/" + key
	s.run("systemd-run", "--unit=sandbox", "unshare", "--mount", "--propagation=private", "sh", "-c",
		"mkdir -p "+point+" && mount -t xfs "+s.device+" "+point+" && exec sleep 1000")
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
