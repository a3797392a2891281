//go:build system

package containerd

import (
	"fmt"
	"os"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
)

// steps are the places in crust-runc at which it is killed, in their order.
var steps = []string{"crust-runc-mounted", "volume-attached", "volume-bound", "crust-runc-placed"}

// TestCrustRuncKilledAtEveryStep kills crust-runc while it sets up a container.
// The container does not start; kubelet's next attempt does, and so does another
// pod after one that never had a container.
func TestCrustRuncKilledAtEveryStep(t *testing.T) {
	r, where := newKilledNode(t)
	for i, step := range steps {
		t.Run(step, func(t *testing.T) {
			r := r.of(t)
			v := r.staged(fmt.Sprintf("pod-%d", i), filesystems[i%len(filesystems)])
			pod := r.pod(v.pod)
			check.Must(t, os.WriteFile(where, []byte(step), 0o600))
			_, err := pod.Run(r.ctx(), cri.Container{Name: "main", Mounts: []cri.Mount{at(v.target)}})
			check.Must(t, os.Remove(where))
			if err == nil {
				t.Fatalf("the container runs, and crust-runc was to die at %s", step)
			}
			v.wantUnseen()
			id, err := pod.Run(r.ctx(), cri.Container{Name: "main", Attempt: 1, Mounts: []cri.Mount{at(v.target)}})
			check.Must(t, err)
			sum := r.write(id, "/data/blob")
			v.wantStats(id)
			r.remove(pod)
			v.unstage()
			v.check()
			r.killedForGood(v, where, step)
			v.wantSum("blob", sum)
		})
	}
	r.wantClean()
}

// newKilledNode makes a node on which crust-runc dies at the failpoint that a file names,
// while the file is there.
func newKilledNode(t *testing.T) (r *testNode, where string) {
	t.Helper()
	dir := t.TempDir()
	where, wrapper := dir+"/where", dir+"/crust-runc"
	program := crustRunc(t)
	script := fmt.Sprintf("#!/bin/sh\nif [ -f %s ]; then CRUST_FAILPOINTS=$(cat %s)=kill; export CRUST_FAILPOINTS; fi\nexec %s \"$@\"\n", where, where, program)
	check.Must(t, os.WriteFile(wrapper, []byte(script), 0o755)) //nolint:gosec // a program
	r = &testNode{t: t, program: program, node: newNode(t, map[string]string{"crust": wrapper})}
	t.Cleanup(r.killAgents)
	r.d = rig.NewDaemon(t)
	r.d.Containerd = r.node.Socket
	r.d.Handlers = "default: crust\ncrust: {enabled: true, programs: [" + program + "]}"
	r.d.Start()
	return r, where
}

// killedForGood has a pod that never gets a container: its volume is free again
// when it is removed.
func (r *testNode) killedForGood(v *volume, where, step string) {
	r.t.Helper()
	v.pod += "-unlucky"
	v.stage()
	pod := r.pod(v.pod)
	check.Must(r.t, os.WriteFile(where, []byte(step), 0o600))
	for attempt := range uint32(2) {
		if _, err := pod.Run(r.ctx(), cri.Container{Name: "main", Attempt: attempt, Mounts: []cri.Mount{at(v.target)}}); err == nil {
			r.t.Errorf("a container runs, and crust-runc was to die at %s", step)
		}
	}
	check.Must(r.t, os.Remove(where))
	r.remove(pod)
	v.unstage()
	v.check()
}
