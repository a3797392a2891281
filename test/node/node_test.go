//go:build system

package node

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// program is this one in the machine.
const program = "/usr/local/bin/node.test"

var packages = []string{"crust-runtimes", "crust-proxy"}

// TestNode installs the packages on a node, and uses them through its life.
func TestNode(t *testing.T) {
	files := ourFiles(t)
	for _, name := range packages {
		files[newer(t, rig.Package(t, name, "deb"))] = "/root/next-" + name + ".deb"
	}
	m := install(t, "trixie", files)
	m.step("a node", m.isNode)
	m.step("installed", m.installed)
	m.step("exposure", m.exposure)
	m.step("doctor", m.doctor)
	for _, name := range []string{"ext4", "xfs", "btrfs", "outlives", "starts"} {
		m.step(name, func() { m.inside(name) })
	}
	m.step("reboot", m.rebooted)
	m.step("lasts", func() { m.inside("lasts") })
	m.step("removed", m.removed)
}

// ourFiles are the packages and this program, and where they are in the machine.
func ourFiles(t *testing.T) map[string]string {
	t.Helper()
	self := check.Value(os.Executable())(t)
	files := map[string]string{self: program}
	for _, name := range packages {
		files[rig.Package(t, name, "deb")] = "/root/" + name + ".deb"
	}
	return files
}

// newer makes a package of a newer version of another one.
func newer(t *testing.T, deb string) string {
	t.Helper()
	tree, out := t.TempDir(), filepath.Join(t.TempDir(), filepath.Base(deb))
	rig.Command(t, "dpkg-deb", "--raw-extract", deb, tree+"/tree")
	rig.Command(t, "sed", "-i", "s/^Version: .*/Version: 99.0/", tree+"/tree/DEBIAN/control")
	rig.Command(t, "dpkg-deb", "-Znone", "--build", tree+"/tree", out)
	return out
}

// inside runs one of the tests that run in the machine.
func (m *machine) inside(name string) {
	m.t.Helper()
	said := m.run("env", "CI=true", insideEnv+"=1", program, "-test.v", "-test.timeout=9m", "-test.run="+name)
	check.Says(m.t, "the test", said, "--- PASS: "+name)
	m.t.Log(said)
}

// step is a subtest, without which the next ones make no sense.
func (m *machine) step(name string, do func()) {
	outer := m.t
	outer.Run(name, func(t *testing.T) {
		m.t = t
		defer func() { m.t = outer }()
		do()
	})
	if outer.Failed() {
		outer.FailNow()
	}
}

// isNode: what the other tests stand on is not so on the machine that runs them, as a rule.
func (m *machine) isNode() {
	for command, want := range map[string]string{
		"cat /proc/1/comm":                                   "systemd",
		"stat --file-system -c %T /sys/fs/cgroup":            "cgroup2fs",
		"grep -c CapEff:.000001ffffffffff /proc/self/status": "1",
		"systemctl is-system-running":                        "running",
		"systemctl is-active containerd":                     "active",
	} {
		got := m.sh(command)
		check.That(m.t, got == want, "%s says %q; want %q", command, got, want)
	}
}

func (m *machine) installed() {
	m.sh("dpkg -i crust-*.deb")
	for _, unit := range []string{"crust-proxy.service", "crust-proxy-runtime.socket", "crust-proxy-admin.socket"} {
		check.That(m.t, m.run("systemctl", "is-enabled", unit) == "enabled", "%s is not enabled", unit)
	}
	check.Eventually(m.t, "the service to be started", func() bool { return m.property("ActiveState") == "active" })
	m.run("systemctl", "stop", "crust-proxy.service") // where it was not started, the first call does that
	m.sh(`test "$(stat -c %F:%a /run/crust-proxy/{runtime,admin}.sock | uniq)" = socket:600; systemctl is-active crust-proxy-{runtime,admin}.socket`)
	m.sh("mkdir -p $(dirname " + keptTarget + ")")
	publish := "crustctl publish " + kept + " " + keptTarget + " --fs ext4"
	out, err := m.try("bash", "-c", "exec 9<"+kept+"; "+publish+" 9<&- || exit") // the first call
	check.That(m.t, err != nil && strings.Contains(out, `("bash")`), "while another process has the device open: %s, %v", out, err)
	m.sh(publish)
	check.That(m.t, m.property("ActiveState") == "active", "the first call did not start the service")
	check.That(m.t, m.property("NFileDescriptorStore") == "1", "systemd keeps %s descriptors", m.property("NFileDescriptorStore"))
	check.That(m.t, m.property("ControlGroup") == "/system.slice/crust-proxy.service", "the service is in %s", m.property("ControlGroup"))
}

// exposure is how systemd judges the unit that runs, as hack/check-systemd.sh has it judge the file.
func (m *machine) exposure() {
	const limit = 4.5
	said := m.run("systemd-analyze", "security", "--no-pager", "crust-proxy.service")
	found := regexp.MustCompile(`exposure level for crust-proxy.service: ([0-9.]+)`).FindStringSubmatch(said)
	check.Require(m.t, len(found) == 2, "%v", said)
	level, err := strconv.ParseFloat(found[1], 64)
	check.That(m.t, err == nil && level <= limit, "the exposure is %v, more than %v: %v\n%s", level, limit, err, said)
}

// doctor: all is well with crust-runc, whose programs and drop-in are set up as docs/quick-start.md has it.
func (m *machine) doctor() {
	m.configure("handlers: {default: crust, crust: {enabled: true}}", "crust-runc")
	m.wantWell()
}

// configure gives crust-proxy a configuration and drop-ins for its unit. From here on, the unit's filter kills whoever
// makes a system call that it refuses: an error may go unnoticed.
func (m *machine) configure(text string, dropIns ...string) {
	m.t.Helper()
	m.sh(`cd /usr/share/crust-proxy && cat >/etc/crust-proxy/config.yaml <<<'` + text + `'
install -D -m 644 -t /etc/systemd/system/crust-proxy.service.d ` + strings.Join(dropIns, ".conf ") + `.conf
printf '[Service]\nSystemCallErrorNumber=kill\n' >/etc/systemd/system/crust-proxy.service.d/kill.conf
systemctl daemon-reload && systemctl restart crust-proxy && systemctl reload crust-proxy`)
}

// wantWell: doctor only misses Kata, which is not installed.
func (m *machine) wantWell() {
	m.t.Helper()
	check.Says(m.t, "doctor", m.run("crustctl", "doctor", "--wait", "3m"), " ok, 1 warning, 0 errors", "no Kata configuration", "the kernel's own count proves")
}

// rebooted: the units start in order, no volume is left, and all is well. Who has volumes publishes them again.
func (m *machine) rebooted() {
	m.reboot()
	check.Equal(m.t, m.sh("systemctl is-system-running || systemctl --failed --no-pager"), "running", "the machine is")
	var last int
	for _, unit := range []string{"local-fs.target", "crust-proxy-runtime.socket", "containerd.service", "crust-proxy.service"} {
		said := m.run("systemctl", "show", "--value", "--property=ActiveEnterTimestampMonotonic", unit)
		at, err := strconv.Atoi(said)
		check.That(m.t, err == nil && at > last, "%s became active at %q, and what it needs at %d", unit, said, last)
		last = at
	}
	check.Says(m.t, "crustctl list", m.run("crustctl", "list"), "No volumes")
	m.wantWell()
	m.run("crustctl", "unpublish", keptTarget)
	m.sh("mount " + kept + " /mnt && umount /mnt")
}

// removed: nothing that runs is left, and the machine is well.
func (m *machine) removed() {
	m.wantNoneKilled()
	m.sh("dpkg --purge crust-proxy crust-runtimes")
	check.Succeeds(m.t, "nothing is left", func() error {
		left := m.sh("ls -d /run/crust-proxy /etc/crust-proxy /var/lib/crust-proxy 2>/dev/null || true; " +
			"systemctl --failed --no-legend; ls -l /proc/[0-9]*/exe 2>/dev/null | grep /usr/bin/crust || true")
		if left != "" {
			return errors.New(left)
		}
		return nil
	})
}

// wantNoneKilled wants that the unit's filter of system calls has killed nothing since configure.
func (m *machine) wantNoneKilled() {
	m.t.Helper()
	check.Equal(m.t, m.sh("journalctl --no-pager | grep -e type=1326 -e status=31/SYS || true"), "", "the filter of system calls has killed")
}

// property is one of the service's.
func (m *machine) property(name string) string {
	m.t.Helper()
	return m.run("systemctl", "show", "--value", "--property="+name, "crust-proxy.service")
}
