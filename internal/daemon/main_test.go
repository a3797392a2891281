package daemon

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestWrongCommandLinesSayWhatIsRight(t *testing.T) {
	for line, want := range map[string]string{
		"valdate":               `no command "valdate"; there are validate, version, removable, removable-nodes, withdraw`,
		"version now":           "version takes no arguments",
		"removable-nodes":       "removable-nodes takes HOST:PORT",
		"removable-nodes a b c": "removable-nodes takes HOST:PORT",
		"--no-such-flag":        "--no-such-flag",
	} {
		code, said := askMain(t, strings.Fields(line)...)
		if code != exitUsage || !strings.Contains(said, want) || !strings.Contains(said, "see crust-proxy --help") {
			t.Errorf("%s: exit code %d: %s", line, code, said)
		}
	}
}

// TestHelpCanBePaged: what is asked for goes to stdout.
func TestHelpCanBePaged(t *testing.T) {
	var out, complaints strings.Builder
	if code := Main([]string{"--help"}, &out, &complaints); code != exitOK || complaints.Len() > 0 || !strings.Contains(out.String(), "--config") {
		t.Errorf("exit code %d, %q on stdout, %q on stderr", code, out.String(), complaints.String())
	}
}

// TestValidateSaysWhatItChecked: without --config it is not the service's file.
func TestValidateSaysWhatItChecked(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(file, []byte("reconcileInterval: 0s\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for want, args := range map[string][]string{
		"# the defaults and flags alone: no --config is given; the service reads /etc/crust-proxy/config.yaml\n": {"validate"},
		"# " + file + ", with the defaults and flags\n":                                                          {"validate", "--config", file},
		"# reconcileInterval: 0 is never":                                                                        {"validate", "--config", file},
	} {
		if code, said := askMain(t, args...); code != exitOK || !strings.Contains(said, want) {
			t.Errorf("%q: exit code %d, %q is not in\n%s", args, code, want, said)
		}
	}
}

// TestValidateKnowsTheNode: what is missing is said, and is no error, because the daemon starts without.
func TestValidateKnowsTheNode(t *testing.T) {
	dir := t.TempDir()
	file, kubeconfig := filepath.Join(dir, "config.yaml"), filepath.Join(dir, "kubelet.conf")
	for path, text := range map[string]string{kubeconfig: "{", file: `runDir: /proc/crust
kubeletRoot: ` + dir + `/kubelet
runtimeSocket: {path: ` + dir + `/none/runtime.sock}
adminSocket: {path: ` + kubeconfig + `}
containerd: {socket: ` + dir + `/containerd.sock}
cluster: {kubeconfig: ` + kubeconfig + `}
front: {enabled: true}
handlers: {crust: {enabled: true, programs: [` + dir + `/runc], filesystems: [nofs]}}
`} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	code, said := askMain(t, "validate", "--config", file)
	for _, want := range []string{
		"runDir: /proc/crust is not on tmpfs", "kubeletRoot: stat " + dir + "/kubelet: no such file", "runtimeSocket.path: stat " + dir + "/none: no such",
		"adminSocket.path: " + kubeconfig + " is not a socket", "containerd.socket: stat " + dir,
		"cluster.kubeconfig: the kubeconfig " + kubeconfig + " cannot be used", "handlers.crust.programs[0]: stat " + dir + "/runc",
		"handlers.*.filesystems: mkfs.nofs is not installed",
	} {
		if !strings.Contains(said, "\n# on this node: "+want) || code != exitOK {
			t.Errorf("exit code %d, %q is not in\n%s", code, want, said)
		}
	}
	if code, said := askMain(t, "validate", "--quiet", "--config", file); code != exitOK || said != "" {
		t.Errorf("quiet: exit code %d, %q", code, said)
	}
}

// TestValidateRefusesWhatAStartRefuses in lines that an editor can follow, also if nothing else is to be shown.
func TestValidateRefusesWhatAStartRefuses(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(file, []byte("log:\n  level: loud\nhtp: {}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	want := file + ":2:3: log.level: \"loud\" is none of debug, info, warn, error\n" + file + ":3:1: htp: unknown key; did you mean http?\n"
	if code, said := askMain(t, "validate", "-q", "--config", file); code != exitError || said != want {
		t.Errorf("exit code %d, %q", code, said)
	}
	code, said := askMain(t, "--config", file) // in the format of the log
	for line := range strings.Lines(said) {
		if code != exitError || !strings.Contains(line, `"level":"error"`) || !strings.Contains(line, `"file":"`+file+`","line":`) {
			t.Errorf("a start: exit code %d, %q", code, said)
		}
	}
	code, said = askMain(t, "validate", "-q", "--run-dir", stateWith(t, "lvm/p1"))
	if code != exitError || !strings.Contains(said, "front.enabled: false cannot be put in force: 1 deferred volume(s)") {
		t.Errorf("a front with volumes is left: exit code %d, %q", code, said)
	}
}
