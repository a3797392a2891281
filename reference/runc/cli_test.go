package runc

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// crust runs a command of our own over a root of its own.
func crust(t *testing.T, root string, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "c.json")
	raw, err := json.Marshal(map[string]any{"root": root, "stateDir": filepath.Join(filepath.Dir(root), "state")})
	check.Must(t, err)
	check.Must(t, os.WriteFile(file, raw, 0o600))
	t.Setenv(configVariable, file)
	var out, told bytes.Buffer
	status = crustMain(args, &out, &told)
	return status, out.String(), told.String()
}

func TestExitStatus(t *testing.T) {
	root := filepath.Join(t.TempDir(), "crust")
	target := "/a/target"
	dir := filepath.Join(root, abi.DirName(target))
	check.Must(t, os.MkdirAll(dir, 0o700))
	info := `{"volume-type":"block","device":"/dev/null","fstype":"ext4","metadata":{"crust.targetPath":"/a/target"}}`
	check.Must(t, os.WriteFile(dir+"/"+abi.InfoName, []byte(info), 0o600))
	for name, c := range map[string]struct {
		args []string
		want int
		told string
	}{
		"nothing":            {nil, abi.ExitUsage, "a command is missing; see `crust-runc crust help`"},
		"unknown":            {[]string{"eat", target}, abi.ExitUsage, `there is no command "eat"; see`},
		"too few":            {[]string{"resize", target, "1"}, abi.ExitUsage, "resize takes 3 arguments, not 2; see"},
		"too many":           {[]string{"stats", target, "1"}, abi.ExitUsage, "stats takes 1 argument, not 2; see"},
		"negative":           {[]string{"resize", target, "-1", "0"}, abi.ExitUsage, "-1"},
		"no number":          {[]string{"freeze", target, "soon"}, abi.ExitUsage, "soon"},
		"relative":           {[]string{"stats", "a"}, abi.ExitUsage, "absolute"},
		"unknown volume":     {[]string{"stats", "/b"}, abi.ExitNoSandbox, "/b"},
		"no sandbox":         {[]string{"stats", target}, abi.ExitNoSandbox, target},
		"no sandbox, freeze": {[]string{"freeze", target, "5"}, abi.ExitNoSandbox, target},
		"not frozen":         {[]string{"thaw", target}, abi.ExitWrongState, "not frozen"},
		"no sandbox, resize": {[]string{"resize", target, "0", "0"}, abi.ExitNoSandbox, target},
	} {
		status, out, told := crust(t, root, c.args...)
		if status != c.want || out != "" || !strings.Contains(told, c.told) || strings.Count(told, "\n") != 1 {
			t.Errorf("%s: status %d, printed %q, told %q", name, status, out, told)
		}
	}
	if status, out, _ := crust(t, root, "help"); status != abi.ExitOK || !strings.Contains(out, "stats  TARGET") {
		t.Errorf("help: %d, %q", status, out)
	}
	if status, out, told := crust(t, root, abi.ThawExpired); status != abi.ExitOK || told != "" || out != `{"thawed":null,"next_seconds":0}`+"\n" {
		t.Errorf("nothing is frozen: %d, %q, %q", status, out, told)
	}
	check.Must(t, os.WriteFile(dir+"/"+abi.InfoName, []byte("?"), 0o600))
	if status, _, told := crust(t, root, "stats", target); status != abi.ExitRefused || !strings.Contains(told, abi.InfoName) {
		t.Errorf("a bad file: %d, %q", status, told)
	}
}

func TestDeadSandboxesAreNotAsked(t *testing.T) {
	root := filepath.Join(t.TempDir(), "crust")
	target := "/a/target"
	dir := filepath.Join(root, abi.DirName(target))
	check.Must(t, os.MkdirAll(dir, 0o700))
	check.Must(t, os.WriteFile(dir+"/"+abi.InfoName, []byte(`{"volume-type":"block","device":"/dev/null","fstype":"ext4"}`), 0o600))
	for name, note := range map[string]string{
		"dead": `{"pid":1,"start":18446744073709551615}`, "odd": "?", "zero": `{}`, "huge": `{"pid":2147483647,"start":1}`,
	} {
		check.Must(t, os.WriteFile(dir+"/"+name, []byte(note), 0o600))
	}
	if status, out, told := crust(t, root, "stats", target); status != abi.ExitNoSandbox {
		t.Fatalf("status %d, printed %q, told %q", status, out, told)
	}
}
