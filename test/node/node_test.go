//go:build system

package node

import (
	"os"
	"regexp"
	"strconv"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// program is this one in the machine.
const program = "/usr/local/bin/node.test"

// TestNode installs the packages on a node, and uses them through its life.
func TestNode(t *testing.T) {
	self, err := os.Executable()
	check.Must(t, err)
	files := map[string]string{self: program}
	for _, name := range []string{"crust-runtimes", "crust-proxy"} {
		files[rig.Package(t, name, "deb")] = "/root/" + name + ".deb"
	}
	m := install(t, files)
	m.step("a node", m.isNode)
	m.step("installed", m.installed)
	m.step("exposure", m.exposure)
	m.step("doctor", m.doctor)
	for _, fs := range []string{"ext4", "xfs", "btrfs"} {
		m.step("pod on "+fs, func() {
			m.t.Log(m.run("env", insideEnv+"=1", program, "-test.v", "-test.timeout=9m", "-test.run="+fs))
		})
	}
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
		"systemctl is-system-running --wait":                 "running",
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
	check.That(m.t, m.property("ActiveState") == "inactive", "the service runs before the first call")
	m.sh(`test "$(stat -c %F:%a /run/crust-proxy/{runtime,admin}.sock | uniq)" = socket:600; systemctl is-active crust-proxy-{runtime,admin}.socket`)
	m.run("crustctl", "list") // the first call
	check.That(m.t, m.property("ActiveState") == "active", "the first call did not start the service")
	check.That(m.t, m.property("ControlGroup") == "/system.slice/crust-proxy.service", "the service is in %s", m.property("ControlGroup"))
}

// exposure is how systemd judges the unit that runs, as hack/check-systemd.sh has it judge the file.
func (m *machine) exposure() {
	const limit = 4.5
	said := m.run("systemd-analyze", "security", "--no-pager", "crust-proxy.service")
	found := regexp.MustCompile(`exposure level for crust-proxy.service: ([0-9.]+)`).FindStringSubmatch(said)
	if len(found) != 2 {
		m.t.Fatal(said)
	}
	level, err := strconv.ParseFloat(found[1], 64)
	check.That(m.t, err == nil && level <= limit, "the exposure is %v, more than %v: %v\n%s", level, limit, err, said)
}

// doctor: all is well with crust-runc, whose programs and drop-in are set up as docs/quick-start.md has it.
func (m *machine) doctor() {
	m.sh(`echo 'handlers: {kata: {enabled: false}, crust: {enabled: true}}' >/etc/crust-proxy/config.yaml
install -D -m 644 -t /etc/systemd/system/crust-proxy.service.d /usr/share/crust-proxy/crust-runc.conf
systemctl daemon-reload && systemctl restart crust-proxy`)
	check.Says(m.t, "doctor", m.run("crustctl", "doctor", "--wait", "3m"), " ok, 0 warnings, 0 errors")
}

// property is one of the service's.
func (m *machine) property(name string) string {
	m.t.Helper()
	return m.run("systemctl", "show", "--value", "--property="+name, "crust-proxy.service")
}
