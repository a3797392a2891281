//go:build system

package containerd

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// agents lists the processes of our program that answer for all sandboxes.
func (r *rig) agents() (pids []int) {
	entries, _ := filepath.Glob("/proc/[0-9]*")
	for _, proc := range entries {
		pid, _ := strconv.Atoi(filepath.Base(proc))
		if program, _ := os.Readlink(proc + "/exe"); program != r.program+"-agent" {
			continue
		}
		// What thaws a frozen volume is the same program, with words.
		command, _ := os.ReadFile(proc + "/cmdline")
		if !slices.Contains(strings.Split(string(command), "\x00"), "crust") {
			pids = append(pids, pid)
		}
	}
	return pids
}

func (r *rig) killAgents() {
	for _, pid := range r.agents() {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
}

// The agent comes with the first sandbox, is one, and goes with the last; where it
// is killed, the program answers.
func TestAgentComesAndGoes(t *testing.T) {
	r := newRig(t, "installed")
	first, second := r.staged("pod-1", "ext4"), r.staged("pod-2", "xfs")
	one, two := r.pod("pod-1"), r.pod("pod-2")
	inOne, inTwo := r.run(one, "main", at(first.target)), r.run(two, "main", at(second.target))
	first.wantStats(inOne)
	second.wantStats(inTwo)
	pids := r.agents()
	if len(pids) != 1 {
		t.Fatalf("the agents are %v", pids)
	}
	must(t, syscall.Kill(pids[0], syscall.SIGKILL))
	first.wantStats(inOne)
	r.remove(one)
	first.unstage()
	second.wantStats(inTwo)
	r.remove(two)
	second.unstage()
	eventually(t, "no agent is left", func() bool { return len(r.agents()) == 0 })
}

// A node may have no agent at all.
func TestWithoutAgent(t *testing.T) {
	config := t.TempDir() + "/crust-runc.json"
	must(t, os.WriteFile(config, []byte(`{"agent": false}`), 0o600))
	r := layOut(t, "installed", "CRUST_RUNC_CONFIG="+config)
	r.d.Start()
	v := r.staged("pod-1", "xfs")
	pod := r.pod("pod-1")
	id := r.run(pod, "main", at(v.target))
	v.wantStats(id)
	if pids := r.agents(); len(pids) > 0 {
		t.Errorf("the agents are %v", pids)
	}
	if _, err := os.Stat(filepath.Join(abi.DefaultRoot, abi.DirName(v.target), abi.SocketName)); err == nil {
		t.Error("a socket is named that nobody serves")
	}
	v.grow(grownSize)
	_, err := v.expand(grownSize)
	must(t, err)
	v.wantStats(id)
	r.remove(pod)
	v.unstage()
}

// A frozen filesystem thaws by itself, also when everything that could thaw it
// was killed.
func TestFreezeEnds(t *testing.T) {
	r := newRig(t, "installed")
	v := r.staged("pod-1", "ext4")
	pod := r.pod("pod-1")
	id := r.run(pod, "main", at(v.target))
	v.wantStats(id)
	r.crust("freeze", v.target, "60")
	if r.writesIn(id, 300*time.Millisecond) {
		t.Error("a frozen volume was written to")
	}
	r.crust("thaw", v.target)
	if !r.writesIn(id, 10*time.Second) {
		t.Error("a volume that was thawed cannot be written to")
	}
	r.crust("freeze", v.target, "2")
	r.killAgents()
	if !r.writesIn(id, 10*time.Second) {
		t.Error("a volume that was frozen for two seconds cannot be written to")
	}
	r.remove(pod)
	v.unstage()
	v.check()
}

// crust asks the handler's program, as the daemon does where there is no socket.
func (r *rig) crust(args ...string) {
	r.t.Helper()
	if out, err := exec.Command(r.program, append([]string{"crust"}, args...)...).CombinedOutput(); err != nil {
		r.t.Fatalf("crust-runc crust %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// writesIn tells whether a write ends in time. One that does not goes on.
func (r *rig) writesIn(container string, limit time.Duration) bool {
	done := make(chan error, 1)
	go func() {
		_, err := r.node.Exec(r.ctx(), container, "echo x >> /data/file && sync")
		done <- err
	}()
	select {
	case err := <-done:
		must(r.t, err)
		return true
	case <-time.After(limit):
		return false
	}
}
