//go:build system

package vm

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/vmnode"
)

// liarScene is a pod whose guest lies, beside one whose guest does not.
type liarScene struct {
	*scene
	honest     *scene
	supervisor int
}

// lies makes the guest lie from now on.
func (s *liarScene) lies(word string) { s.exec(s.container, word) }

// wantHonest wants the other pod to go on, and its stats to be answered.
func (s *liarScene) wantHonest() {
	s.t.Helper()
	s.honest.wantProgress(s.honest.container)
	if _, err := s.honest.v.Stats(); err != nil {
		s.t.Errorf("the honest guest's volume: %v", err)
	}
}

// TestAgentThatLies in a machine, to everything between its port and kubelet. Each lie is an
// error that names the volume, in its time; memory is bounded; and a volume in another
// machine is not affected.
func TestAgentThatLies(t *testing.T) {
	b := newBench(t)
	honest := b.scene("pv-honest", "ext4")
	b.exec(honest.container, "touch /tmp/calm")
	program := t.TempDir() + "/liar"
	check.Must(t, rig.BuildStatic(program, "test/vm/liar"))
	b.Configure(t, map[string]any{"agentProgram": program, "hangTimeoutSeconds": 15})
	for _, last := range []string{"drip", "flood", "die"} {
		t.Run(last, func(t *testing.T) {
			s := b.of(t).liar(last, honest)
			if last == "drip" {
				s.believesNothing()
			}
			_, _ = s.CRI.Exec(s.ctx(), s.container, last) // this may be cut off already
			began := time.Now()
			if _, err := s.v.Stats(); err == nil || time.Since(began) > 40*time.Second {
				t.Errorf("stats end after %v with: %v", time.Since(began), err)
			}
			check.Eventually(t, "the machine is over", func() bool { return len(s.Machines()) == 1 })
			s.wantHonest()
			vmnode.End(s.ctx(), t, s.pod)
			s.v.giveBack()
		})
	}
	for _, lie := range []string{"immortal", "undeletable"} {
		t.Run(lie, func(t *testing.T) {
			s := b.of(t).liar(lie, honest)
			s.lies(lie)
			_, _ = s.CRI.CRI.StopContainer(s.ctx(), &runtimeapi.StopContainerRequest{ContainerId: s.container})
			check.Eventually(t, "the machine is over", func() bool { return len(s.Machines()) == 1 })
			s.wantHonest()
			vmnode.End(s.ctx(), t, s.pod)
			s.v.giveBack()
		})
	}
	honest.over()
	b.WantClean(t)
}

func (b *bench) liar(name string, honest *scene) *liarScene {
	b.t.Helper()
	v := b.volume("pv-"+name, "ext4")
	s := &liarScene{scene: &scene{bench: b, v: v, pod: b.pod(v.Pod)}, honest: honest}
	s.container = b.run(s.pod, "main", at(v))
	var err error
	s.supervisor, err = s.pod.Pid(b.ctx())
	check.Must(b.t, err)
	return s
}

// believesNothing tells the lies that a machine survives.
func (s *liarScene) believesNothing() {
	s.t.Helper()
	before := map[int]int{s.supervisor: peak(s.t, s.supervisor), s.Daemon.Pid(): peak(s.t, s.Daemon.Pid())}
	const broken = "broke the wire protocol"
	s.refuses("negative", broken)
	s.refuses("overflow", broken)
	s.refuses("word", broken)
	s.refuses("text", "the guest: volume pv-other")
	for range 400 {
		_, _ = s.v.Stats()
	}
	s.lies("size")
	if err := s.v.Grow(2 * diskSize); err == nil {
		s.t.Error("it has not grown, and is said to have")
	}
	s.refuses("silence", "")
	// Its word that it does not have the volume ends nothing: it is asked again.
	s.refuses("gone", "the guest: volume pv-other")
	s.lies("size")
	if _, err := s.v.Stats(); err != nil {
		s.t.Errorf("after a guest has denied its volume: %v", err)
	}
	for pid, was := range before {
		if is := peak(s.t, pid); is > was+64*mib { // all that was said is more
			s.t.Errorf("process %d had %d bytes, and now has had %d", pid, was, is)
		}
	}
}

// refuses wants a lie about stats be an error, and the volume stay the pod's.
func (s *liarScene) refuses(lie, says string) {
	s.t.Helper()
	s.lies(lie)
	began := time.Now()
	_, err := s.v.Stats()
	took := time.Since(began)
	if err == nil || !strings.Contains(err.Error(), says) || says != "" && !strings.Contains(err.Error(), s.v.Target) ||
		len(err.Error()) > 4096 || strings.ContainsAny(err.Error(), "\n\x1b") || took > 40*time.Second {
		s.t.Errorf("%s: after %v: %v", lie, took, err)
	}
	s.t.Logf("%s: after %v: %.300v", lie, took, err)
	if err := s.v.TryUnpublish(); status.Code(err) != codes.Aborted {
		s.t.Errorf("%s: unpublish below a running pod: %v", lie, err)
	}
	s.wantHonest()
}

// peak is the most memory that a process has had.
func peak(t *testing.T, pid int) int {
	t.Helper()
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	check.Must(t, err)
	for line := range strings.Lines(string(raw)) {
		if value, is := strings.CutPrefix(line, "VmHWM:"); is {
			kib, err := strconv.Atoi(strings.TrimSuffix(strings.TrimSpace(value), " kB"))
			check.Must(t, err)
			return kib << 10
		}
	}
	t.Fatalf("process %d has no VmHWM", pid)
	return 0
}
