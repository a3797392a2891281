//go:build system

package package_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// onNode runs commands beside the packaging scripts ($scripts), in mounts of their own: an
// empty /run, and an /etc with this configuration. Systemd seems to run, and does
// everything that it is asked to.
func onNode(t *testing.T, config, commands string, env ...string) (said string, err error) {
	t.Helper()
	rig.Need(t, "unshare", "flock")
	programs := t.TempDir()
	daemon, err := os.ReadFile(rig.Program(t, "crust-proxy"))
	check.Must(t, err)
	check.Must(t, os.WriteFile(filepath.Join(programs, "crust-proxy"), daemon, 0o700))
	check.Must(t, os.WriteFile(filepath.Join(programs, "systemctl"), []byte("#!/bin/sh\n"), 0o700))
	const node = `
for dir in /run /etc /sys/fs/cgroup; do mount -t tmpfs none $dir; done
mount -t overlay none /usr/bin -o "lowerdir=$programs:/usr/bin"
mkdir -p /run/systemd/system /etc/crust-proxy
printf %s "$config" >/etc/crust-proxy/config.yaml
`
	cmd := exec.CommandContext(t.Context(), "unshare", "--mount", "/bin/sh", "-ec", node+commands)
	cmd.Env = append(os.Environ(), "programs="+programs, "config="+config, "scripts="+filepath.Join(repository(t), "packaging"))
	cmd.Env = append(cmd.Env, env...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// TestRemovalBesideAnotherDaemon: the package goes after a change to the DaemonSet, whose
// daemon has the same run directory.
func TestRemovalBesideAnotherDaemon(t *testing.T) {
	const directory = "mkdir -p /run/crust-proxy/state/tmp; : >/run/crust-proxy/daemon.lock\n"
	said, err := onNode(t, "", directory+`
exec 9>/run/crust-proxy/daemon.lock; flock 9
$scripts/postremove.sh remove
[ -d /run/crust-proxy/state/tmp ] && [ -e /run/crust-proxy/daemon.lock ]`)
	if err != nil {
		t.Errorf("the directory of the other daemon was cleared: %v\n%s", err, said)
	}
	if said, err := onNode(t, "", directory+"$scripts/postremove.sh remove; [ ! -e /run/crust-proxy ]"); err != nil {
		t.Errorf("without another daemon the directory was left: %v\n%s", err, said)
	}
}
