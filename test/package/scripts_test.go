//go:build system

package package_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// onNode runs commands beside the packaging scripts ($scripts), in mounts of their own: an empty /run and /var, and an
// /etc with this configuration. Systemd seems to run; all that systemctl does is $atCall.
func onNode(t *testing.T, config, commands string, env ...string) (said string, err error) {
	t.Helper()
	rig.Need(t, "unshare", "flock")
	const systemctl = "#!/bin/sh\neval \"$atCall\"\necho systemctl $*\n"
	programs := t.TempDir()
	daemon := check.Value(os.ReadFile(rig.Program(t, "crust-proxy")))(t)
	check.Must(t, os.WriteFile(filepath.Join(programs, "crust-proxy"), daemon, 0o700))
	check.Must(t, os.WriteFile(filepath.Join(programs, "systemctl"), []byte(systemctl), 0o700))
	const node = `
for dir in /run /etc /var /sys/fs/cgroup; do mount -t tmpfs none $dir; done
mkdir -p /run/systemd/system /etc/crust-proxy /var/upper /var/work
mount -t overlay none /usr/bin -o "lowerdir=$programs:/usr/bin,upperdir=/var/upper,workdir=/var/work"
printf %s "$config" >/etc/crust-proxy/config.yaml
`
	cmd := exec.CommandContext(t.Context(), "unshare", "--mount", "/bin/sh", "-ec", node+commands)
	cmd.Env = append(append(os.Environ(), "programs="+programs, "config="+config, "scripts="+filepath.Join(repository(t), "packaging")), env...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// apart is another daemon, with a run directory of its own.
const apart = "mkdir -p /var/lib/kubelet/crust-proxy; exec 9>/var/lib/kubelet/crust-proxy/daemon.lock; flock 9\n"

// TestRemovalBesideAnotherDaemon: the package goes after a change to the DaemonSet, whose
// daemon has the same run directory, and the volumes.
func TestRemovalBesideAnotherDaemon(t *testing.T) {
	const directory = "mkdir -p /run/crust-proxy/state/tmp /run/crust-proxy/state/volumes; : >/run/crust-proxy/daemon.lock\n"
	const living = "exec 9>/run/crust-proxy/daemon.lock; flock 9; echo { >/run/crust-proxy/state/volumes/v.json\n"
	is := func(state string) string { return "atCall=[ $1 != is-active ] || { echo " + state + "; exit; }" }
	said, err := onNode(t, "", directory+living+"$scripts/preremove.sh remove", is("active"))
	check.That(t, err != nil && !strings.Contains(said, "\nsystemctl disable"), "under its own volumes: %v\n%s", err, said)
	said, err = onNode(t, "", directory+living+"$scripts/preremove.sh remove", is("activating"))
	check.That(t, err != nil && strings.Contains(said, "first: systemctl disable --now crust-proxy-runtime.socket"), "while it waits for the lock: %v\n%s", err, said)
	said, err = onNode(t, "", directory+living+`
$scripts/preremove.sh remove
$scripts/postremove.sh remove
[ -d /run/crust-proxy/state/tmp ] && [ -e /run/crust-proxy/daemon.lock ]`, is("inactive"))
	check.That(t, err == nil && strings.Contains(said, "systemctl disable --now crust-proxy-runtime.socket"), "the directory of the other daemon was cleared, or a unit stays: %v\n%s", err, said)
	said, err = onNode(t, "", apart+"$scripts/preremove.sh remove", is("inactive"))
	check.That(t, err == nil && strings.Contains(said, "systemctl disable --now"), "the other daemon has a run directory of its own: %v\n%s", err, said)
	said, err = onNode(t, "", `: >/etc/crust-proxy/crust-vm.json
$scripts/postremove.sh purge
ls /etc/crust-proxy
$scripts/runtimes-postremove.sh purge
[ ! -e /etc/crust-proxy ]`)
	check.That(t, err == nil && strings.Contains(said, "crust-vm.json\n") && !strings.Contains(said, "config.yaml"), "a purge beside the runtimes, and of them: %v\n%s", err, said)
	said, err = onNode(t, "", directory+"mkdir -p /var/lib/crust-proxy; : >/var/lib/crust-proxy/accepted.yaml; $scripts/postremove.sh remove; [ ! -e /run/crust-proxy ] && [ ! -e /var/lib/crust-proxy/accepted.yaml ]")
	check.That(t, err == nil, "without another daemon the directory, or the accepted configuration, was left: %v\n%s", err, said)
}

// TestRemovalWhileAVolumeComes: the daemon serves until it is stopped, and the volume came
// after the first look at the records.
func TestRemovalWhileAVolumeComes(t *testing.T) {
	const atStop = "atCall=[ $1 != stop ] || { mkdir -p /run/crust-proxy/state/volumes; echo { >/run/crust-proxy/state/volumes/v.json; }"
	said, err := onNode(t, "", "$scripts/preremove.sh remove", atStop+"; [ $1 != is-active ] || [ $2 = crust-proxy.service ] || { echo inactive; exit; }")
	check.That(t, err != nil && strings.Contains(said, "deferred volumes may live") && strings.Contains(said, "systemctl start crust-proxy.service\n") && !strings.Contains(said, "\nsystemctl disable"),
		"%v, it says %s", err, said)
	said, err = onNode(t, "", "$scripts/preremove.sh remove", atStop, "CRUST_PROXY_ABANDON_VOLUMES=1")
	check.That(t, err == nil && strings.Contains(said, "systemctl disable"), "insisted: %v, it says %s", err, said)
	said, err = onNode(t, "", "$scripts/preremove.sh remove")
	check.That(t, err == nil && strings.Contains(said, "systemctl disable"), "without a volume: %v, it says %s", err, said)
}

// TestRemovalUnderASecondDaemon is refused before anything is stopped.
func TestRemovalUnderASecondDaemon(t *testing.T) {
	const begin = `crust-proxy --run-dir /run/two --kubelet-root /var/two 2>/run/log &
until [ -e /run/two/daemon.lock ] || ! kill -0 $!; do sleep 0.05; done; echo $! >/run/pid
`
	const remove = "\n$scripts/preremove.sh remove || refused=$?; kill $! && wait $! && exit $refused"
	for also, atCall := range map[string]string{"": "", "cd /usr/bin; cp crust-proxy new; mv new crust-proxy": "", apart: "[ $1 != is-active ] || { echo inactive; exit; }"} {
		said, err := onNode(t, "", begin+also+remove, "atCall="+atCall)
		check.That(t, err != nil && strings.Contains(said, "still runs this program") && !strings.Contains(said, "\nsystemctl "), "after %q: %v, it says %s", also, err, said)
	}
	said, err := onNode(t, "", begin+remove, "atCall=[ $1 != show ] || { cat /run/pid; exit; }")
	check.That(t, err == nil, "the second is the unit's own: %v, it says %s", err, said)
}

// TestRemovalWithABadConfiguration is refused, because nothing is known of volumes, and can be insisted on.
func TestRemovalWithABadConfiguration(t *testing.T) {
	said, err := onNode(t, "no-such-key: 1", "$scripts/preremove.sh remove")
	check.That(t, err != nil && strings.Contains(said, "CRUST_PROXY_ABANDON_VOLUMES=1"), "%v, it says %s", err, said)
	said, err = onNode(t, "no-such-key: 1", "$scripts/preremove.sh remove", "CRUST_PROXY_ABANDON_VOLUMES=1")
	check.That(t, err == nil, "insisted: %v\n%s", err, said)
}

// TestFirstInstall enables the units and starts the daemon, since nobody may ever call it. What an operator has masked,
// and a daemon that runs already, stay as they are.
func TestFirstInstall(t *testing.T) {
	const (
		all     = "crust-proxy.service crust-proxy-runtime.socket crust-proxy-admin.socket"
		mark    = ": >/run/crust-proxy.reinstalled\n"
		marked  = "[ ! -e /run/crust-proxy.reinstalled ] || echo marked"
		offline = "rmdir /run/systemd/system\n"
		start   = "systemctl start --no-block crust-proxy.service\n"
		locked  = "mkdir /run/crust-proxy; exec 9>/run/crust-proxy/daemon.lock; flock 9\n"
	)
	online := "systemctl enable " + all + "\nsystemctl daemon-reload\n"
	started := online + "systemctl start crust-proxy-runtime.socket crust-proxy-admin.socket\n" + start
	for what, c := range map[string]struct{ config, commands, atCall, want string }{
		"dpkg":                       {"", "$scripts/postinstall.sh configure ''", "", started},
		"rpm":                        {"", "$scripts/postinstall.sh 1", "", started},
		"again, without a purge":     {"", mark + "$scripts/postinstall.sh configure 1.0; " + marked, "", started},
		"a bad configuration":        {"no-such-key: 1", "$scripts/postinstall.sh 1", "", strings.TrimSuffix(started, start)},
		"an image":                   {"", offline + "$scripts/postinstall.sh 1", "", "systemctl enable " + all + "\n"},
		"an image's removal":         {"", offline + "$scripts/preremove.sh 0", "", "systemctl disable --quiet crust-proxy-runtime.socket crust-proxy-admin.socket crust-proxy.service\n"},
		"an image's upgrade":         {"", offline + "$scripts/postinstall.sh configure 1.0", "", ""},
		"another daemon runs":        {"", locked + "$scripts/postinstall.sh 1", "", "systemctl daemon-reload\ncrust-proxy: another daemon"},
		"with its own run directory": {"", apart + "$scripts/postinstall.sh 1", "", "systemctl daemon-reload\ncrust-proxy: another daemon"},
		"a masked unit":              {"", "$scripts/postinstall.sh 1", "[ $1 != is-enabled ] || echo masked", "systemctl daemon-reload\n"},
		"an upgrade of a masked":     {"", "$scripts/postinstall.sh 2", "[ $1 != is-enabled ] || echo masked-runtime", "systemctl daemon-reload\n"},
		"units cannot be enabled":    {"", mark + "$scripts/postinstall.sh configure 1.0 || " + marked, "[ $1 != enable ] || exit 1", "marked\n"},
	} {
		said, err := onNode(t, c.config, c.commands, "atCall="+c.atCall)
		check.That(t, err == nil && strings.HasPrefix(said, c.want) && strings.Contains(said, start) == strings.Contains(c.want, start) && strings.Contains(said, "marked\n") == (c.want == "marked\n") && (c.want != "" || said == ""),
			"%s: %v, it says %s", what, err, said)
	}
}

// TestUpgradeWithABadConfiguration restarts nothing, and leaves the package configured.
func TestUpgradeWithABadConfiguration(t *testing.T) {
	for _, upgrade := range []string{"configure 1.0", "2"} { // dpkg, rpm
		said, err := onNode(t, "no-such-key: 1", "$scripts/postinstall.sh "+upgrade)
		check.That(t, err == nil && !strings.Contains(said, "restart crust-proxy.service") && strings.Contains(said, "config.yaml:1:1: no-such-key"),
			"%s: %v\n%s", upgrade, err, said)
		said, err = onNode(t, "", "$scripts/postinstall.sh "+upgrade)
		check.That(t, err == nil && strings.Contains(said, "try-restart crust-proxy.service"), "%s with a good one: %v\n%s", upgrade, err, said)
	}
}

// TestUpgradeFromOnePackage: all programs were in crust-proxy once. While pods run by crust-runc, no
// upgrade takes it from them: dpkg's is refused, and rpm's leaves it. crust-runtimes takes it over.
func TestUpgradeFromOnePackage(t *testing.T) {
	m := boot(t)
	for format, tool := range map[string]struct {
		program       []string
		owner, remove string
	}{
		"deb": {[]string{"dpkg", "-i"}, "dpkg-query --search", "dpkg --purge"},
		"rpm": {[]string{"rpm", "--force-debian", "--nodeps", "-U"}, "rpm --queryformat %{NAME}: -qf", "rpm --force-debian --nodeps -e"},
	} {
		upgrade := func(packages ...string) (string, error) {
			out, err := m.command(tool.program[0], append(tool.program[1:], packages...)...).CombinedOutput()
			return string(out), err
		}
		next := func(name string) string { return m.bring(rig.Package(t, name, format)) }
		said, err := upgrade(m.bring(onePackage(t, format)))
		check.Require(t, err == nil, "%v %v", err, said)
		m.run("touch", "/run/a-pod-runs")
		said, err = upgrade(next(name))
		check.That(t, strings.Contains(said, "in the package crust-runtimes now") && (err != nil) == (format == "deb"),
			"%s: an upgrade under a pod: %v\n%s", format, err, said)
		said = m.run("crust-runc", "crust", "version")
		check.That(t, said == "one package", "%s: after it crust-runc is %q", format, said)
		if format == "rpm" {
			m.run("rpm", "--force-debian", "--nodeps", "-U", "--oldpackage", m.bring(onePackage(t, format)))
		}
		said, err = upgrade(next("crust-runtimes"), next("crust-backup"), next(name))
		check.That(t, err == nil, "%s: %v\n%s", format, err, said)
		for program, owner := range map[string]string{"crustctl": name, "crust-backup": "crust-backup", "crust-runc": "crust-runtimes"} {
			got := m.run("sh", "-c", tool.owner+" /usr/bin/"+program)
			check.That(t, strings.HasPrefix(got, owner+":"), "%s: %s is of %q", format, program, got)
		}
		m.run("crustctl", "version", "--client")
		check.Equal(t, m.run("sh", "-c", "crust-runc crust removable && find /usr/bin -name '*.kept'"), "", "%s left", format)
		m.run("rm", "/run/a-pod-runs")
		m.run("sh", "-c", tool.remove+" "+strings.Join(names, " "))
	}
}

// onePackage builds a crust-proxy of the time before there were others.
func onePackage(t *testing.T, format string) string {
	t.Helper()
	dir := t.TempDir()
	const runtime = "#!/bin/sh\n[ $2 != version ] || echo one package\n[ $2 != removable ] || [ ! -e /run/a-pod-runs ]\n"
	tree := filepath.Join(dir, "tree/usr/bin")
	check.Must(t, os.MkdirAll(tree, 0o755))
	for _, program := range []string{"crust-proxy", "crustctl", "crust-backup", "crust-runc", "crust-vm"} {
		check.Must(t, os.WriteFile(filepath.Join(tree, program), []byte(runtime), 0o755))
	}
	text := "name: crust-proxy\narch: amd64\nversion: 0.0.0-dev.20261101000000\nmaintainer: nobody <nobody@crust-proxy.invalid>\ndescription: all in one\n" +
		"contents: [{src: " + dir + "/tree, dst: /, type: tree}]\n"
	check.Must(t, os.WriteFile(filepath.Join(dir, "nfpm.yaml"), []byte(text), 0o600))
	run(t, "go", "tool", "-modfile="+repository(t)+"/tools/nfpm/go.mod", "nfpm", "package", "--config", dir+"/nfpm.yaml", "--packager", format, "--target", dir)
	paths, err := filepath.Glob(dir + "/*." + format)
	check.That(t, err == nil && len(paths) == 1, "the packages are %q, %v", paths, err)
	return paths[0]
}
