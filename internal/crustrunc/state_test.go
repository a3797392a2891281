package crustrunc

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// record writes runc's record of a sandbox.
func record(t *testing.T, root, sandbox, content string) {
	t.Helper()
	must(t, os.MkdirAll(filepath.Join(root, sandbox), 0o700))
	must(t, os.WriteFile(filepath.Join(root, sandbox, "state.json"), []byte(content), 0o600))
}

func TestSandboxProcess(t *testing.T) {
	self, err := identify(os.Getpid())
	must(t, err)
	root := t.TempDir()
	asked := filepath.Join(root, "runc")
	must(t, os.WriteFile(asked, fmt.Appendf(nil, "#!/bin/sh\n[ \"$1 $2 $3\" = '--root %s state' ] || exit 1\n"+
		"case $4 in other|stale|odd) echo '{\"pid\":%d,\"status\":\"running\"}' ;; ended) echo '{\"pid\":0,\"status\":\"stopped\"}' ;; *) echo unknown >&2; exit 1 ;; esac\n",
		root, os.Getpid()), 0o700)) //nolint:gosec // a program
	record(t, root, "known", fmt.Sprintf(`{"id":"known","init_process_pid":%d,"init_process_start":%d}`, self.PID, self.Start))
	record(t, root, "stale", fmt.Sprintf(`{"id":"stale","init_process_pid":%d,"init_process_start":%d}`, self.PID, self.Start+1))
	record(t, root, "odd", `{"id":"known"`)
	record(t, root, "other", fmt.Sprintf(`{"id":"known","init_process_pid":1,"init_process_start":%d}`, self.Start))
	for sandbox, want := range map[string]string{
		"known": "", "stale": "", "odd": "", "other": "", "ended": "has ended", "nobody": "unknown", "../known": "id of a sandbox",
	} {
		p, err := sandboxProcess(asked, invocation{root: root}, sandbox)
		if want == "" && (err != nil || p != self) || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %+v, %v", sandbox, p, err)
		}
	}
	// What is on record is not asked.
	if p, err := sandboxProcess("/does/not/exist", invocation{root: root}, "known"); err != nil || p != self {
		t.Errorf("%+v, %v", p, err)
	}
}
