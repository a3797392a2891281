package runc

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/oci"
	"github.com/crust-proxy/crust-proxy/reference/handler"
	"github.com/crust-proxy/crust-proxy/reference/process"
)

// sandboxProcess finds the process of a sandbox. It checks that the id is that of a sandbox of
// the same pod: otherwise the volume would be mounted for the processes of another container.
func sandboxProcess(runtime string, in handler.Invocation, of oci.Sandbox) (pause, error) {
	if !abi.IsSandboxID(of.ID) {
		return pause{}, fmt.Errorf("%q cannot be the id of a sandbox", of.ID)
	}
	p, bundle, ok := recordedProcess(in.Root, of.ID)
	if !ok {
		var err error
		if p, bundle, err = queryProcess(runtime, in, of.ID); err != nil {
			return pause{}, err
		}
	}
	return p, checkSandbox(bundle, of)
}

// checkSandbox checks the annotations in the sandbox's own bundle.
func checkSandbox(bundle string, of oci.Sandbox) error {
	spec, err := handler.ReadSpec(bundle)
	if err != nil {
		return fmt.Errorf("sandbox %s: whether it is one cannot be told: %w", of.ID, err)
	}
	is, known := oci.SandboxOf(spec)
	if !known || !is.Self || is.ID != of.ID {
		return fmt.Errorf("%s is not a sandbox by the annotations of its own bundle %s", of.ID, bundle)
	}
	if is.PodUID != "" && is.PodUID != of.PodUID {
		return fmt.Errorf("sandbox %s is of pod %s, and this container is of pod %q", of.ID, is.PodUID, of.PodUID)
	}
	return nil
}

// record is runc's state file of a container.
type record struct {
	ID     string `json:"id"`
	PID    int    `json:"init_process_pid"`
	Start  uint64 `json:"init_process_start"`
	Config struct {
		// Labels are the annotations as name=value, and runc's own after them.
		Labels []string `json:"labels"`
	} `json:"config"`
}

func readRecord(root, id string) (r record, err error) {
	raw, err := os.ReadFile(filepath.Join(root, id, "state.json")) //nolint:gosec // runc's root and an id that is no path
	if err == nil {
		err = json.Unmarshal(raw, &r)
	}
	if err == nil && r.ID != id {
		err = fmt.Errorf("the record of %s is of %q", id, r.ID)
	}
	return r, err
}

// recordedProcess reads the process and the bundle from runc's state file, which is faster than
// a start of runc. ok is false if the file cannot be read, or no such process lives.
func recordedProcess(root, sandbox string) (p pause, bundle string, ok bool) {
	if root == "" {
		return pause{}, "", false
	}
	r, err := readRecord(root, sandbox)
	if err != nil {
		return pause{}, "", false
	}
	for _, label := range r.Config.Labels {
		if path, is := strings.CutPrefix(label, "bundle="); is {
			bundle = path // the last is runc's own
		}
	}
	p = pause{process.Process{PID: r.PID, Start: r.Start}}
	return p, bundle, bundle != "" && p.Lives()
}

// queryProcess runs `runc state`. Before we read the start time, the process may have ended and
// its PID been reused: the same answer of a second run proves that it has not.
func queryProcess(runtime string, in handler.Invocation, sandbox string) (p pause, bundle string, err error) {
	pid, bundle, err := runcState(runtime, in, sandbox)
	if err != nil {
		return pause{}, "", err
	}
	found, err := process.Of(pid)
	if err != nil {
		return pause{}, "", fmt.Errorf("sandbox %s: its process %d cannot be looked at: %w", sandbox, pid, err)
	}
	again, _, err := runcState(runtime, in, sandbox)
	if err == nil && again != pid {
		err = fmt.Errorf("sandbox %s: its process was %d, and is %d now: try again", sandbox, pid, again)
	}
	return pause{found}, bundle, err
}

func runcState(runtime string, in handler.Invocation, sandbox string) (pid int, bundle string, err error) {
	var args []string
	if in.Root != "" {
		args = append(args, "--root", in.Root)
	}
	var out, told bytes.Buffer
	cmd := exec.Command(runtime, append(args, "state", sandbox)...) //nolint:gosec // the operator's runc
	cmd.Stdout, cmd.Stderr = &out, &told
	if err := cmd.Run(); err != nil {
		return 0, "", fmt.Errorf("sandbox %s: %s does not know it: %w: %s; a deferred volume needs a sandbox with a process "+
			"of its own (for CRI-O: drop_infra_ctr = false)", sandbox, runtime, err, strings.TrimSpace(told.String()))
	}
	var state specs.State
	if err := json.Unmarshal(out.Bytes(), &state); err != nil {
		return 0, "", fmt.Errorf("sandbox %s: the answer of %s cannot be read: %w", sandbox, runtime, err)
	}
	if state.Pid <= 0 || state.Status == specs.StateStopped {
		return 0, "", fmt.Errorf("sandbox %s: %w: kubelet makes a new one; where the container runtime says for long that the sandbox "+
			"is ready, as CRI-O does when conmon was killed too, run `crictl stopp %s`, or delete the pod", sandbox, process.ErrEnded, sandbox)
	}
	return state.Pid, state.Bundle, nil
}

// endUnstarted deletes the containers of a sandbox that were created and never started, when the sandbox itself is
// deleted. containerd forgets a container if kubelet gives up its start while the shim creates it: its mounts would keep
// the volume busy for ever. Where that fails, the sandbox stays: its deletion is repeated, and nothing else ends them.
func endUnstarted(runtime string, in handler.Invocation) error {
	if in.Root == "" || len(in.Words) != 1 {
		return nil
	}
	if _, _, lives := recordedProcess(in.Root, in.Words[0]); lives && !in.Has("force", "f") {
		return nil // runc refuses to delete it
	}
	// runc removes this file when the container starts.
	waiting, err := filepath.Glob(filepath.Join(in.Root, "*", "exec.fifo"))
	if err != nil {
		return err
	}
	var errs []error
	for _, fifo := range waiting {
		id := filepath.Base(filepath.Dir(fifo))
		r, err := readRecord(in.Root, id)
		if err != nil {
			continue // it is being deleted
		}
		if of, known := oci.SandboxOf(r.spec()); !known || of.Self || of.ID != in.Words[0] {
			continue
		}
		out, err := exec.Command(runtime, "--root", in.Root, "delete", "--force", id).CombinedOutput() //nolint:gosec // the operator's runc
		if err != nil {
			errs = append(errs, fmt.Errorf("container %s was never started and cannot be ended: %w: %s", id, err, bytes.TrimSpace(out)))
		}
	}
	return errors.Join(errs...)
}

// spec returns a spec with the annotations of the container, which runc stores as labels. The
// bundle may not exist any more.
func (r record) spec() *specs.Spec {
	notes := make(map[string]string)
	for _, label := range r.Config.Labels {
		if name, value, is := strings.Cut(label, "="); is {
			notes[name] = value
		}
	}
	return &specs.Spec{Annotations: notes}
}
