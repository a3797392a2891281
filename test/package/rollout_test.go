//go:build system

package package_test

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// TestRollOut installs on a node by deploy/nodes/roll-out.sh, where ssh leads into the machine. It stops at a
// node that refuses, and leaves it as it was.
func TestRollOut(t *testing.T) {
	m := boot(t)
	dir := t.TempDir()
	put := func(name, format string, args ...any) string {
		path := dir + "/" + name
		check.Must(t, os.WriteFile(path, fmt.Appendf(nil, format, args...), 0o755)) //nolint:gosec // programs
		return path
	}
	ssh := put("ssh", "#!/bin/sh\n[ $1 = node-1 ] || exit 255\nexec nsenter --all --target=%d -- sh -c \"$2\"\n", m.init)
	scp := put("scp", "#!/bin/sh\nexec cp \"$1\" /proc/%d/root\"${2#*:}\"\n", m.init)
	rollOut := func(args ...string) (string, error) {
		cmd := exec.Command(repository(t)+"/deploy/nodes/roll-out.sh", args...)
		cmd.Env = append(os.Environ(), "SSH="+ssh, "SCP="+scp, "WAIT=1m")
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	deb := rig.Package(t, name, "deb")
	good, bad := put("good.yaml", "http: {listen: \"\"}\n"), put("bad.yaml", "frnt: {enabled: true}\n")
	said, err := rollOut(deb, good, "--", "node-1", "unreachable", "node-1")
	check.That(t, err != nil && strings.Contains(said, "node-1: installed and healthy") && strings.Count(said, "healthy") == 1 &&
		strings.Contains(said, "unreachable: "), "%v: %s", err, said)
	check.Equal(t, m.run("cat", "/etc/crust-proxy/config.yaml"), `http: {listen: ""}`, "the configuration is")
	left := m.run("sh", "-c", "ls -d /var/tmp/crust-proxy.* 2>/dev/null || true; ls /etc/crust-proxy/config.yaml.old")
	check.That(t, left == "/etc/crust-proxy/config.yaml.old", "left: %s", left)
	said, err = rollOut(deb, bad, "--", "node-1", "node-1")
	check.That(t, err != nil && strings.Contains(said, "was not accepted") && strings.Count(said, "Stopped") == 1, "%v: %s", err, said)
	check.Equal(t, m.run("cat", "/etc/crust-proxy/config.yaml"), `http: {listen: ""}`, "a configuration that was not accepted is")
	for _, args := range [][]string{{}, {deb}, {deb, "--"}, {"file.zip", "--", "node-1"}} {
		said, err := rollOut(args...)
		check.That(t, err != nil && strings.Contains(said, "usage: roll-out.sh"), "%q: %v: %s", args, err, said)
	}
}

// TestRollOutAsks: what each node is asked, where ssh is a program that notes it and answers.
func TestRollOutAsks(t *testing.T) {
	dir := t.TempDir()
	note := "#!/bin/sh\necho \"$2\" >>" + dir + "/asked\n"
	check.Must(t, os.WriteFile(dir+"/ssh", []byte(note+`case $2 in
mktemp*) echo ${MADE:-/var/tmp/crust-proxy.a1B2c3D4} ;;
*"$REFUSE"*) exit 1 ;;
*version*) PATH=`+dir+`:$PATH exec sh -c "$2" ;;
esac
`), 0o755)) //nolint:gosec // a program
	check.Must(t, os.WriteFile(dir+"/crustctl", []byte("#!/bin/sh\nprintf 'crustctl     1\ncrust-proxy  %s\n' ${RUNS:-1}\n"), 0o755)) //nolint:gosec // a program
	check.Must(t, os.WriteFile(dir+"/scp", []byte(note), 0o755))                                                                      //nolint:gosec // a program
	ask := func(env ...string) (said, asked string) {
		check.Must(t, os.WriteFile(dir+"/asked", nil, 0o600))
		cmd := exec.Command(repository(t)+"/deploy/nodes/roll-out.sh", "new.rpm", "new.yaml", "--", "a")
		cmd.Env = append(append(os.Environ(), "SSH="+dir+"/ssh", "SCP="+dir+"/scp", "REFUSE=no-such"), env...)
		out, _ := cmd.CombinedOutput()
		return string(out), string(check.Value(os.ReadFile(dir + "/asked"))(t))
	}
	const own, removes = "/var/tmp/crust-proxy.a1B2c3D4", "rm -rf /var/tmp/crust-proxy.a1B2c3D4\n"
	said, asked := ask()
	check.Says(t, "what was asked, after "+said, asked, "rpm -U --oldpackage --replacepkgs "+own+"/new.rpm\n", "a:"+own+"/config.yaml\n", removes)
	for refused, want := range map[string]string{"rpm": "was not installed", "validate": "was not accepted", "restart": "config.yaml.old"} {
		said, asked = ask("REFUSE=" + refused)
		check.That(t, strings.Contains(said, want) && strings.HasSuffix(asked, removes), "%s: %s%s", refused, said, asked)
	}
	said, _ = ask("RUNS=2")
	check.That(t, strings.Contains(said, "another version than the installed one"), "another version runs: %s", said)
	said, asked = ask("MADE=/etc")
	check.That(t, strings.Contains(said, "no directory") && !strings.Contains(asked, "rm"), "%s%s", said, asked)
}
