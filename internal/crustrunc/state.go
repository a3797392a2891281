package crustrunc

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"
)

// sandboxProcess asks runc for the process of a sandbox.
func sandboxProcess(runtime string, in invocation, sandbox string) (pause, error) {
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
