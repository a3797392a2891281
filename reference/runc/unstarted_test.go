package runc

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/reference/handler"
	"github.com/crust-proxy/crust-proxy/reference/process"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// Only what was created for the sandbox and waits to be started ends with it.
func TestOnlyTheSandboxesUnstartedContainersEnd(t *testing.T) {
	root := t.TempDir()
	waiting := func(id, sandbox, kind string) {
		keep(t, root, id, fmt.Sprintf(`{"id":%q,"config":{"labels":["io.kubernetes.cri.sandbox-id=%s","io.kubernetes.cri.container-type=%s"]}}`,
			id, sandbox, kind))
		check.Must(t, os.WriteFile(filepath.Join(root, id, "exec.fifo"), nil, 0o600))
	}
	waiting("mine", "sandbox", "container")
	waiting("others", "another", "container")
	waiting("started", "sandbox", "container")
	check.Must(t, os.Remove(filepath.Join(root, "started", "exec.fifo")))
	waiting("sandbox", "sandbox", "sandbox")
	waiting("odd", "sandbox", "container")
	check.Must(t, os.WriteFile(filepath.Join(root, "odd", "state.json"), []byte("{"), 0o600))
	runc := filepath.Join(root, "runc")
	check.Must(t, os.WriteFile(runc, []byte("#!/bin/sh\necho \"$@\" >>"+root+"/asked\n"), 0o700)) //nolint:gosec // a program

	for _, args := range [][]string{{"--root", root, "delete", "sandbox"}, {"--root", root, "delete", "others"}, {"delete", "sandbox"}, {"--root", root, "delete"}} {
		check.Must(t, endUnstarted(runc, handler.ParseArgs(args)))
	}
	asked, err := os.ReadFile(filepath.Join(root, "asked"))
	check.Must(t, err)
	if want := "--root " + root + " delete --force mine\n"; string(asked) != want {
		t.Errorf("runc was asked %q, not %q", asked, want)
	}
	self, err := process.Of(os.Getpid())
	check.Must(t, err)
	keep(t, root, "sandbox", fmt.Sprintf(`{"id":"sandbox","init_process_pid":%d,"init_process_start":%d,"config":{"labels":["bundle=/b"]}}`, self.PID, self.Start))
	check.Must(t, os.Remove(filepath.Join(root, "asked")))
	check.Must(t, endUnstarted(runc, handler.ParseArgs([]string{"--root", root, "delete", "sandbox"})))
	if _, err := os.Stat(filepath.Join(root, "asked")); err == nil {
		t.Error("the containers of a living sandbox, which runc does not delete, were ended")
	}
	check.Must(t, os.WriteFile(runc, []byte("#!/bin/sh\necho no >&2; exit 1\n"), 0o700)) //nolint:gosec // a program
	err = endUnstarted(runc, handler.ParseArgs([]string{"--root", root, "delete", "--force", "sandbox"}))
	if err == nil || !strings.Contains(err.Error(), "container mine") || !strings.Contains(err.Error(), "no") {
		t.Errorf("what cannot be ended is told as %v", err)
	}
}
