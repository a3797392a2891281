package runc

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/oci"
	"github.com/crust-proxy/crust-proxy/reference/handler"
	"github.com/crust-proxy/crust-proxy/reference/process"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// keep writes runc's record of a sandbox.
func keep(t *testing.T, root, sandbox, content string) {
	t.Helper()
	check.Must(t, os.MkdirAll(filepath.Join(root, sandbox), 0o700))
	check.Must(t, os.WriteFile(filepath.Join(root, sandbox, "state.json"), []byte(content), 0o600))
}

// sandboxBundle writes the bundle of a container with these annotations.
func sandboxBundle(t *testing.T, root, name string, notes map[string]string) string {
	t.Helper()
	dir := filepath.Join(root, "bundles", name)
	check.Must(t, os.MkdirAll(dir, 0o700))
	raw, err := json.Marshal(specs.Spec{Annotations: notes})
	check.Must(t, err)
	check.Must(t, os.WriteFile(dir+"/config.json", raw, 0o600))
	return dir
}

func containerdNotes(id, kind, pod string) map[string]string {
	return map[string]string{
		"io.kubernetes.cri.sandbox-id": id, "io.kubernetes.cri.container-type": kind, "io.kubernetes.cri.sandbox-uid": pod,
	}
}

func TestSandboxProcess(t *testing.T) {
	self, err := process.Of(os.Getpid())
	check.Must(t, err)
	root := t.TempDir()
	asked := filepath.Join(root, "runc")
	check.Must(t, os.WriteFile(asked, fmt.Appendf(nil, "#!/bin/sh\n[ \"$1 $2 $3\" = '--root %s state' ] || exit 1\n"+
		"case $4 in other|stale|odd|bare) echo '{\"pid\":%d,\"status\":\"running\",\"bundle\":\"%s/bundles/'$4'\"}' ;; "+
		"ended) echo '{\"pid\":0,\"status\":\"stopped\"}' ;; *) echo unknown >&2; exit 1 ;; esac\n",
		root, os.Getpid(), root), 0o700)) //nolint:gosec // a program
	recorded := func(name, id string, start uint64) {
		bundle := sandboxBundle(t, root, name, containerdNotes(name, "sandbox", "pod"))
		keep(t, root, name, fmt.Sprintf(`{"id":%q,"init_process_pid":%d,"init_process_start":%d,"config":{"labels":["a=b","bundle=%s"]}}`,
			id, self.PID, start, bundle))
	}
	recorded("known", "known", self.Start)
	recorded("stale", "stale", self.Start+1)
	recorded("other", "known", self.Start)
	recorded("odd", "odd", self.Start)
	keep(t, root, "odd", `{"id":"known"`)
	recorded("bare", "bare", self.Start)
	keep(t, root, "bare", fmt.Sprintf(`{"id":"bare","init_process_pid":%d,"init_process_start":%d}`, self.PID, self.Start))
	for sandbox, want := range map[string]string{
		"known": "", "stale": "", "odd": "", "other": "", "bare": "",
		"ended": "has ended", "nobody": "unknown", "../known": "id of a sandbox",
	} {
		p, err := sandboxProcess(asked, handler.Invocation{Root: root}, oci.Sandbox{ID: sandbox, PodUID: "pod"})
		if want == "" && (err != nil || p != pause(self)) || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %+v, %v", sandbox, p, err)
		}
	}
	// What is on record is not asked.
	if p, err := sandboxProcess("/does/not/exist", handler.Invocation{Root: root}, oci.Sandbox{ID: "known", PodUID: "pod"}); err != nil || p != pause(self) {
		t.Errorf("%+v, %v", p, err)
	}
}

// TestSandboxThatEndsWhileItIsLookedAt: its number may be another process's by then.
func TestSandboxThatEndsWhileItIsLookedAt(t *testing.T) {
	for then, want := range map[string]string{
		`{"pid":0,"status":"stopped"}`:                            "has ended",
		`{"pid":1,"status":"running"}`:                            "is 1 now",
		fmt.Sprintf(`{"pid":%d,"status":"stopped"}`, os.Getpid()): "has ended",
	} {
		root := t.TempDir()
		bundle := sandboxBundle(t, root, "sandbox", containerdNotes("sandbox", "sandbox", "pod"))
		asked := filepath.Join(root, "runc")
		check.Must(t, os.WriteFile(asked, fmt.Appendf(nil, "#!/bin/sh\nif mkdir %s/asked 2>/dev/null; then\n"+
			"echo '{\"pid\":%d,\"status\":\"running\",\"bundle\":\"%s\"}'\nelse echo '%s'\nfi\n", root, os.Getpid(), bundle, then), 0o700)) //nolint:gosec // a program
		p, err := sandboxProcess(asked, handler.Invocation{Root: root}, oci.Sandbox{ID: "sandbox", PodUID: "pod"})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %+v, %v", then, p, err)
		}
	}
}

// The id of another container, or of another pod's sandbox, is not believed.
func TestOnlyThePodsOwnSandboxHoldsItsVolumes(t *testing.T) {
	self, err := process.Of(os.Getpid())
	check.Must(t, err)
	root := t.TempDir()
	mixed := containerdNotes("mixed", "sandbox", "pod")
	mixed["io.kubernetes.cri-o.SandboxID"] = "mixed"
	for name, c := range map[string]struct {
		notes map[string]string
		want  string
	}{
		"sandbox":   {containerdNotes("sandbox", "sandbox", "pod"), ""},
		"crio":      {map[string]string{"io.kubernetes.cri-o.SandboxID": "crio", "io.kubernetes.cri-o.ContainerType": "sandbox"}, ""},
		"container": {containerdNotes("another", "container", "pod"), "not a sandbox"},
		"copied":    {containerdNotes("another", "sandbox", "pod"), "not a sandbox"},
		"victim":    {containerdNotes("victim", "sandbox", "victims-pod"), "of pod victims-pod"},
		"mixed":     {mixed, "not a sandbox"},
		"plain":     {nil, "not a sandbox"},
	} {
		bundle := sandboxBundle(t, root, name, c.notes)
		keep(t, root, name, fmt.Sprintf(`{"id":%q,"init_process_pid":%d,"init_process_start":%d,"config":{"labels":["bundle=%s"]}}`,
			name, self.PID, self.Start, bundle))
		_, err := sandboxProcess("/does/not/exist", handler.Invocation{Root: root}, oci.Sandbox{ID: name, PodUID: "pod"})
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
