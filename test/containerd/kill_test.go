//go:build system

package containerd

import (
	"fmt"
	"strings"
	"syscall"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
)

// scene is a pod that runs on a volume, and what can be killed there.
type scene struct {
	*testNode
	v         *volume
	pod       *cri.Pod
	container string
}

var victims = []string{"container", "shim", "containerd", "crust-proxy"}

// kills gives for each victim what kills it. Pids are looked up beforehand: who could tell them may be dead by then.
func (s *scene) kills() map[string]func() {
	s.t.Helper()
	container := check.Value(s.node.Pid(s.ctx(), s.container))(s.t)
	shim := check.Value(s.pod.Shim(s.ctx()))(s.t)
	pause := check.Value(s.pod.Pid(s.ctx()))(s.t)
	return map[string]func(){
		// Containerd itself kills what a dead shim has left.
		"container":   func() { _ = syscall.Kill(container, syscall.SIGKILL) },
		"sandbox":     func() { _ = syscall.Kill(pause, syscall.SIGKILL) },
		"shim":        func() { _ = syscall.Kill(shim, syscall.SIGKILL) },
		"containerd":  s.node.Process.Kill,
		"crust-proxy": s.d.Kill,
	}
}

func orders(of []string) (all [][]string) {
	if len(of) == 0 {
		return [][]string{nil}
	}
	for i, first := range of {
		rest := append(append([]string{}, of[:i]...), of[i+1:]...)
		for _, order := range orders(rest) {
			all = append(all, append([]string{first}, order...))
		}
	}
	return all
}

// TestKillsInEveryOrder kills everything that has to do with a pod, alone and together, in a soak in every order, while
// the pod writes. What was synced is whole afterwards, the volume can be had again, and nothing is left.
func TestKillsInEveryOrder(t *testing.T) {
	r := newTestNode(t)
	all := append(rig.Sample(orders(victims), 8), append([]string{"sandbox"}, victims...))
	for _, alone := range rig.Sample(all[len(all)-1], 2) {
		all = append(all, []string{alone})
	}
	for i, order := range all {
		r.killAll(fmt.Sprintf("pod-%d", i), filesystems[i%len(filesystems)], order)
	}
	r.wantClean()
}

func (r *testNode) killAll(pod, fs string, order []string) {
	name := fs + ": " + strings.Join(order, ", ")
	r.t.Run(name, func(t *testing.T) {
		r := r.of(t)
		v := r.staged(pod, fs)
		s := &scene{testNode: r, v: v, pod: r.pod(pod)}
		s.container = r.run(s.pod, "main", at(v.target))
		sum := r.write(s.container, "/data/blob")
		r.exec(s.container, cri.Writer)
		kills := s.kills()
		for _, victim := range order {
			kills[victim]()
		}
		s.restart(order)
		// Kubelet too tries again: a container whose shim was killed may still run.
		check.Eventually(t, "the pod is removed", func() bool { return s.pod.Remove(r.ctx()) == nil })
		v.unstage()
		v.check()
		v.wantSum("blob", sum)
		s.useAgain(sum)
	})
}

// restart starts what systemd would.
func (s *scene) restart(killed []string) {
	s.t.Helper()
	for _, one := range killed {
		switch one {
		case "containerd":
			check.Must(s.t, s.node.Process.Start())
		case "crust-proxy":
			s.d.Start()
		}
	}
}

// useAgain publishes the volume anew, for another pod.
func (s *scene) useAgain(sum string) {
	s.t.Helper()
	s.v.pod += "-next"
	s.v.stage()
	pod := s.testNode.pod(s.v.pod)
	id := s.run(pod, "main", at(s.v.target))
	got := s.exec(id, "sha256sum /data/blob")
	check.That(s.t, strings.HasPrefix(got, sum), "the next pod reads %q", got)
	s.exec(id, `cd /data && for f in *.sum; do
		[ ! -e $f ] || [ "$(sha256sum <$f | cut -d' ' -f1).sum" = $f ] || { echo "$f is not whole"; exit 1; }
	done`)
	s.v.wantStats(id)
	s.remove(pod)
	s.v.unstage()
}
