package driver

import (
	"io"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("k8s.io/klog/v2.(*flushDaemon).run.func1"))
}

func TestSizesOnTheCommandLine(t *testing.T) {
	for text, want := range map[string]int64{"1Gi": 1 << 30, "0": 0, "4096": 4096, "2G": 2e9} {
		config, _, err := parse([]string{"--copy-limit", text, "--capacity", text}, io.Discard, io.Discard)
		if err != nil || config.CopyLimit != want || config.Capacity != want {
			t.Errorf("%s: %d and %d, %v", text, config.CopyLimit, config.Capacity, err)
		}
	}
	if config, _, err := parse(nil, io.Discard, io.Discard); err != nil || config.CopyLimit != 1<<30 || config.Capacity != 0 {
		t.Errorf("by default: %+v, %v", config, err)
	}
}

// TestWrongFlagsAreToldAsText: nobody reads a log to learn of a typing error.
func TestWrongFlagsAreToldAsText(t *testing.T) {
	for line, want := range map[string]string{
		"--copy-limit 1gi":   "give bytes, or a whole number with Ki",
		"--copy-limit -1":    "give bytes",
		"--endpoint x":       `--endpoint "x": give unix:///path`,
		"--data-dir x":       `--data-dir "x": give an absolute path`,
		"--freeze-limit 1ms": "--freeze-limit: give whole seconds",
		"--log-level loud":   `--log-level "loud": give debug, info, warn or error`,
		"--nope":             "--nope",
		"serve":              `"serve" is not expected`,
	} {
		var out, complaints strings.Builder
		code := Main(strings.Fields(line), &out, &complaints)
		if code != 2 || !strings.HasPrefix(complaints.String(), "crust-driver: ") ||
			!strings.HasSuffix(complaints.String(), "\nSee 'crust-driver --help'.\n") || !strings.Contains(complaints.String(), want) {
			t.Errorf("%s: exit code %d, %s", line, code, complaints.String())
		}
	}
}

// TestHelpCanBePaged: what is asked for goes to stdout.
func TestHelpCanBePaged(t *testing.T) {
	var out, complaints strings.Builder
	if code := Main([]string{"--help"}, &out, &complaints); code != 0 || complaints.Len() > 0 || !strings.Contains(out.String(), "--copy-limit size") {
		t.Errorf("exit code %d, %q on stdout, %q on stderr", code, out.String(), complaints.String())
	}
}
