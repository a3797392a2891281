//go:build system

package containerd

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
)

func TestMain(m *testing.M) { os.Exit(rig.Main(m)) }

// testNode is a node with the runtime handler `crust`, and a daemon that hands
// volumes to it.
type testNode struct {
	t       *testing.T
	node    *cri.Node
	d       *rig.Daemon
	program string // crust-runc
}

// newNode makes a node that goes with the test, and looks for what its pods leave.
func newNode(t testing.TB, handlers map[string]string) *cri.Node {
	t.Helper()
	rig.Need(t, "runc", "busybox")
	return cri.New(t, cri.Options{Handlers: handlers})
}

// handlerTemp is on the filesystem of the ABI's root, which is the node's /run.
const handlerTemp = "/run/crust-temp"

func newTestNode(t *testing.T) *testNode {
	t.Helper()
	r := layOut(t)
	r.d.Start()
	return r
}

// layOut makes everything but starts no daemon.
func layOut(t *testing.T) *testNode {
	t.Helper()
	program := crustRunc(t)
	r := &testNode{t: t, program: program, node: newNode(t, map[string]string{"crust": program})}
	r.newDaemon("tempDir: " + handlerTemp)
	return r
}

// newWrappedNode makes a node on which a shell script starts crust-runc.
func newWrappedNode(t *testing.T, before string) *testNode {
	t.Helper()
	program, wrapper := crustRunc(t), t.TempDir()+"/crust-runc"
	script := fmt.Sprintf("#!/bin/sh\n%s\nexec %s \"$@\"\n", before, program)
	check.Must(t, os.WriteFile(wrapper, []byte(script), 0o755)) //nolint:gosec // a program
	r := &testNode{t: t, program: program, node: newNode(t, map[string]string{"crust": wrapper})}
	r.newDaemon("")
	r.d.Start()
	return r
}

func (r *testNode) newDaemon(handler string) {
	r.t.Helper()
	// The agent stays for some seconds without a sandbox; one test waits for that.
	r.t.Cleanup(r.killAgents)
	r.d = rig.NewDaemon(r.t)
	r.d.Containerd = r.node.Socket
	r.d.Handlers = "default: crust\ncrust: {enabled: true, programs: [" + r.program + "], " + handler + "}"
}

func (r *testNode) of(t *testing.T) *testNode {
	other := *r
	other.t = t
	return &other
}

// crustRunc builds our runtime, and its agent beside it.
func crustRunc(t *testing.T) string {
	t.Helper()
	rig.Program(t, "crust-runc-agent")
	return rig.Program(t, "crust-runc")
}

// pod runs a sandbox by our runtime handler.
func (r *testNode) pod(uid string) *cri.Pod {
	r.t.Helper()
	return check.Value(r.node.RunPod(r.ctx(), uid, "crust", 0))(r.t)
}

// run runs a container.
func (r *testNode) run(pod *cri.Pod, name string, mounts ...cri.Mount) string {
	r.t.Helper()
	return check.Value(pod.Run(r.ctx(), cri.Container{Name: name, Mounts: mounts}))(r.t)
}

// exec runs a script that must succeed.
func (r *testNode) exec(container, script string) string {
	r.t.Helper()
	out, err := r.node.Exec(r.ctx(), container, script)
	check.Require(r.t, err == nil, "%s: %v", script, err)
	return out
}

func (r *testNode) remove(pod *cri.Pod) {
	r.t.Helper()
	check.Must(r.t, pod.Remove(r.ctx()))
}

// wantClean fails where anything of a volume is left.
func (r *testNode) wantClean() {
	r.t.Helper()
	r.d.WantClean()
	for _, pattern := range []string{abi.DefaultRoot + "/*", handlerTemp + "/*/*"} {
		left, err := filepath.Glob(pattern)
		check.That(r.t, err == nil && len(left) == 0, "left behind: %q, %v", left, err)
	}
}

func (r *testNode) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	r.t.Cleanup(cancel)
	return ctx
}

func at(target string) cri.Mount { return cri.Mount{Host: target, Container: "/data"} }

// newKilledNode makes a node on which crust-runc dies at the failpoint that a file names, while the file is there.
func newKilledNode(t *testing.T) (r *testNode, where string) {
	t.Helper()
	where = t.TempDir() + "/where"
	return newWrappedNode(t, fmt.Sprintf("if [ -f %s ]; then CRUST_FAILPOINTS=$(cat %[1]s)=kill; export CRUST_FAILPOINTS; fi", where)), where
}
