//go:build system

package package_test

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
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
		cmd.Env = append(os.Environ(), "SSH="+ssh, "SCP="+scp, "WAIT=20s")
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	deb := packageOf(t, name, "deb")
	good, bad := put("good.yaml", "http: {listen: \"\"}\n"), put("bad.yaml", "frnt: {enabled: true}\n")
	if said, err := rollOut(deb, good, "--", "node-1", "unreachable", "node-1"); err == nil ||
		!strings.Contains(said, "node-1: installed and healthy") || strings.Count(said, "healthy") != 1 || !strings.Contains(said, "unreachable: ") {
		t.Errorf("%v: %s", err, said)
	}
	if got := m.run("cat", "/etc/crust-proxy/config.yaml"); got != `http: {listen: ""}` {
		t.Errorf("the configuration is %q", got)
	}
	if said, err := rollOut(deb, bad, "--", "node-1", "node-1"); err == nil || !strings.Contains(said, "was not accepted") || strings.Count(said, "Stopped") != 1 {
		t.Errorf("%v: %s", err, said)
	}
	if got := m.run("cat", "/etc/crust-proxy/config.yaml"); got != `http: {listen: ""}` {
		t.Errorf("a configuration that was not accepted is %q", got)
	}
	for _, args := range [][]string{{}, {deb}, {deb, "--"}, {"file.zip", "--", "node-1"}} {
		if said, err := rollOut(args...); err == nil || !strings.Contains(said, "usage: roll-out.sh") {
			t.Errorf("%q: %v: %s", args, err, said)
		}
	}
}
