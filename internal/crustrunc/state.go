package crustrunc

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// sandboxProcess finds the process of a sandbox.
func sandboxProcess(runtime string, in invocation, sandbox string) (pause, error) {
	if !abi.IsSandboxID(sandbox) {
		return pause{}, fmt.Errorf("%q cannot be the id of a sandbox", sandbox)
	}
	if p, ok := recordedProcess(in.root, sandbox); ok {
		return p, nil
	}
	return askedProcess(runtime, in, sandbox)
}

// recordedProcess reads it from runc's own record, which saves a start of runc. It
// is believed where a process of that number and that start lives, and nothing
// else depends on its form: what cannot be read is asked of runc.
func recordedProcess(root, sandbox string) (pause, bool) {
	if root == "" {
		return pause{}, false
	}
	raw, err := os.ReadFile(filepath.Join(root, sandbox, "state.json")) //nolint:gosec // runc's root and an id that is no path
	if err != nil {
		return pause{}, false
	}
	var record struct {
		ID    string `json:"id"`
		PID   int    `json:"init_process_pid"`
		Start uint64 `json:"init_process_start"`
	}
	if json.Unmarshal(raw, &record) != nil || record.ID != sandbox {
		return pause{}, false
	}
	p := pause{PID: record.PID, Start: record.Start}
	return p, p.lives()
}

// askedProcess asks runc.
func askedProcess(runtime string, in invocation, sandbox string) (pause, error) {
	var args []string
	if in.root != "" {
		args = append(args, "--root", in.root)
	}
	var out, told bytes.Buffer
	cmd := exec.Command(runtime, append(args, "state", sandbox)...) //nolint:gosec // the operator's runc
	cmd.Stdout, cmd.Stderr = &out, &told
	if err := cmd.Run(); err != nil {
		return pause{}, fmt.Errorf("sandbox %s: %s does not know it: %w: %s; a deferred volume needs a sandbox with a process "+
			"of its own (for CRI-O: drop_infra_ctr = false)", sandbox, runtime, err, strings.TrimSpace(told.String()))
	}
	var state struct {
		PID    int    `json:"pid"`
		Status string `json:"status"`
	}
	if err := json.Unmarshal(out.Bytes(), &state); err != nil {
		return pause{}, fmt.Errorf("sandbox %s: the answer of %s cannot be read: %w", sandbox, runtime, err)
	}
	if state.PID <= 0 || state.Status == "stopped" {
		return pause{}, fmt.Errorf("sandbox %s: %w: kubelet makes a new one", sandbox, errGone)
	}
	p, err := identify(state.PID)
	if err != nil {
		return pause{}, fmt.Errorf("sandbox %s: its process %d cannot be looked at: %w", sandbox, state.PID, err)
	}
	return p, nil
}
