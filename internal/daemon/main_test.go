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
