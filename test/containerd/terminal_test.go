//go:build system

package containerd

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// bundle is one for runc's own command line: a script in busybox, with or without
// a terminal.
func bundle(t *testing.T, terminal bool, script string) string {
	t.Helper()
	dir := t.TempDir()
	for _, sub := range []string{"bin", "proc", "dev", "sys"} {
		check.Must(t, os.MkdirAll(filepath.Join(dir, "rootfs", sub), 0o755))
	}
	busybox, err := exec.LookPath("busybox")
	check.Must(t, err)
	program, err := os.ReadFile(busybox)
	check.Must(t, err)
	check.Must(t, os.WriteFile(dir+"/rootfs/bin/busybox", program, 0o755)) //nolint:gosec // a program
	spec := exec.Command("runc", "spec", "--bundle", dir)
	if out, err := spec.CombinedOutput(); err != nil {
		t.Fatalf("runc spec: %v\n%s", err, out)
	}
	raw, err := os.ReadFile(dir + "/config.json")
	check.Must(t, err)
	var config map[string]any
	check.Must(t, json.Unmarshal(raw, &config))
	process, _ := config["process"].(map[string]any)
	process["terminal"], process["args"] = terminal, []string{"/bin/busybox", "sh", "-c", script}
	linux, _ := config["linux"].(map[string]any)
	linux["cgroupsPath"] = "/crust-terminal-" + filepath.Base(filepath.Dir(dir))
	raw, err = json.Marshal(config)
	check.Must(t, err)
	check.Must(t, os.WriteFile(dir+"/config.json", raw, 0o600))
	return dir
}

func exitCode(err error) int {
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return exit.ExitCode()
	}
	return -1
}

// A terminal is the container's as it is with runc, and so is how it ends.
func TestTerminal(t *testing.T) {
	rig.Need(t, "runc", "script", "busybox")
	// runc sets the size a moment after the container was started; until then stty shows none.
	dir := bundle(t, true, "busybox tty; for i in $(busybox seq 100); do busybox stty size | busybox grep . && break; busybox sleep 0.1; done; exit 7")
	run := crustRunc(t) + " --root " + t.TempDir() + " run --bundle " + dir + " terminal"
	cmd := exec.Command("script", "--quiet", "--return", "--command", "stty rows 33 cols 44; "+run, "/dev/null")
	cmd.Stdin = nil
	out, err := cmd.CombinedOutput()
	if exitCode(err) != 7 || !strings.Contains(string(out), "/dev/") || !strings.Contains(string(out), "33 44") {
		t.Errorf("it ended with %v:\n%s", err, out)
	}
}

// Signals reach the container, and its end is that of crust-runc.
func TestSignals(t *testing.T) {
	rig.Need(t, "runc", "busybox")
	dir := bundle(t, false, "trap 'exit 5' TERM; echo ready; while :; do busybox sleep 0.05; done")
	cmd := exec.Command(crustRunc(t), "--root", t.TempDir(), "run", "--bundle", dir, "signals")
	out, err := cmd.StdoutPipe()
	check.Must(t, err)
	check.Must(t, cmd.Start())
	ready := make([]byte, len("ready\n"))
	_, err = out.Read(ready)
	check.Must(t, err)
	check.Must(t, cmd.Process.Signal(syscall.SIGTERM))
	kill := time.AfterFunc(20*time.Second, func() { _ = cmd.Process.Kill() })
	defer kill.Stop()
	if err := cmd.Wait(); exitCode(err) != 5 {
		t.Errorf("it ended with %v", err)
	}
}
