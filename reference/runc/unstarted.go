package runc

import (
	"bytes"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/oci"
	"github.com/crust-proxy/crust-proxy/reference/handler"
)

// endUnstarted ends the containers of a sandbox that were created and never started, when
// the sandbox itself is deleted. containerd forgets a container whose start kubelet gives
// up while its shim creates it, and nobody ends it: its mounts would keep the volume for ever.
func endUnstarted(runtime string, in handler.Invocation) error {
	if in.Root == "" || len(in.Words) != 1 {
		return nil
	}
	if _, _, lives := recordedProcess(in.Root, in.Words[0]); lives && !in.Has("force", "f") {
		return nil // runc refuses to delete it
	}
	// runc's file for a start, which is removed by the start.
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

// spec has the annotations of the container: runc keeps them as labels. The bundle may
// have gone.
func (r record) spec() *specs.Spec {
	notes := make(map[string]string)
	for _, label := range r.Config.Labels {
		if name, value, is := strings.Cut(label, "="); is {
			notes[name] = value
		}
	}
	return &specs.Spec{Annotations: notes}
}
