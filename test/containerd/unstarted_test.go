//go:build system

package containerd

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
)

// containerd forgets a container whose start was given up while its shim created it, as a
// kubelet does that ends. Nobody starts it, and it has the volume; another container of
// the pod uses it as before, and it is free when the pod has gone.
func TestContainerThatNobodyKnows(t *testing.T) {
	r := newTestNode(t)
	v := r.staged("pod-1", "ext4")
	other := r.staged("pod-2", "ext4")
	pod, beside := r.pod("pod-1"), r.pod("pod-2")
	id := r.run(pod, "main", at(v.target))
	r.forgotten(pod, id)
	stays := r.forgotten(beside, r.run(beside, "main", at(other.target)))
	sum := r.write(id, "/data/blob")
	r.remove(pod)
	v.unstage()
	v.check()
	v.wantSum("blob", sum)
	check.Must(t, check.Err(os.Stat(stays))) // the other pod's is waiting still
	r.remove(beside)
	other.unstage()
	r.wantClean()
}

// forgotten creates a container as the shim does, like one that is there, and gives the
// file that runc keeps until it is started.
func (r *testNode) forgotten(pod *cri.Pod, like string) (waits string) {
	r.t.Helper()
	shim := check.Value(pod.Shim(r.ctx()))(r.t)
	dir := check.Value(os.Readlink(fmt.Sprintf("/proc/%d/cwd", shim)))(r.t)
	was := filepath.Join(filepath.Dir(dir), like)
	raw := check.Value(os.ReadFile(filepath.Join(was, "config.json")))(r.t)
	var spec specs.Spec
	check.Must(r.t, json.Unmarshal(raw, &spec))
	id := pod.UID + "-forgotten"
	spec.Root.Path, spec.Linux.CgroupsPath = filepath.Join(was, "rootfs"), filepath.Join(filepath.Dir(spec.Linux.CgroupsPath), id)
	raw = check.Value(json.Marshal(spec))(r.t)
	bundle := r.t.TempDir()
	check.Must(r.t, os.WriteFile(filepath.Join(bundle, "config.json"), raw, 0o600))
	root := "/run/containerd/runc/" + filepath.Base(filepath.Dir(dir))
	cmd := exec.CommandContext(r.ctx(), r.program, "--root", root, "create", "--bundle", bundle, id) //nolint:gosec // built by the test
	out := check.Value(os.Create(filepath.Join(bundle, "out")))(r.t)
	defer func() { _ = out.Close() }()
	cmd.Stdout, cmd.Stderr = out, out // a file: the container keeps them open
	if err := cmd.Run(); err != nil {
		told, _ := os.ReadFile(out.Name())
		r.t.Fatalf("it cannot be created: %v: %s", err, told)
	}
	return filepath.Join(root, id, "exec.fifo")
}
