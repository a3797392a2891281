//go:build system

package containerd

import (
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// agents lists the processes of our program that answer for all sandboxes.
func (r *testNode) agents() []int {
	return rig.Processes(func(proc string) bool {
		program, _ := os.Readlink(proc + "/exe")
		// What thaws a frozen volume is the same program, with words.
		command, _ := os.ReadFile(proc + "/cmdline")
		return program == r.program+"-agent" && !strings.Contains(string(command), "\x00crust\x00")
	})
}

func (r *testNode) killAgents() {
	for _, pid := range r.agents() {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
}

// The agent serves all pods, and goes with the last. Like the watchdogs of what is frozen, it does
// not end with the control group of the pod whose shim started it. An agent of an older version,
// which is in that group, leaves it with the next container.
func TestAgentOutlivesAPodsControlGroup(t *testing.T) {
	groups := rig.ControlGroups(t, "shim")
	r := newTestNode(t)
	for _, group := range groups {
		check.Must(t, r.node.Enter(group))
	}
	v := r.staged("pod-1", "ext4")
	pod := r.pod("pod-1")
	id := r.run(pod, "main", at(v.target))
	v.wantStats(id)
	outside := func(pids []int) {
		t.Helper()
		for _, group := range groups {
			for _, pid := range rig.InGroup(t, group) {
				number, _ := strconv.Atoi(pid)
				check.That(t, !slices.Contains(pids, number), "process %s is in %s", pid, group)
			}
		}
	}
	agents := r.agents()
	check.Require(t, len(agents) == 1, "the agents are %v", agents)
	outside(agents)
	v.freeze(time.Minute)
	outside(r.watchdogs())
	check.That(t, len(r.watchdogs()) == 2, "the watchdogs are %v", r.watchdogs())
	r.crust("thaw", v.target)

	for _, group := range groups {
		check.Must(t, os.WriteFile(group+"/cgroup.procs", []byte(strconv.Itoa(agents[0])), 0o600))
	}
	r.run(pod, "second", at(v.target))
	check.That(t, len(r.agents()) == 1, "the agents are %v", r.agents())
	outside(r.agents())
	r.remove(pod)
	v.unstage()
	check.Eventually(t, "no agent is left", func() bool { return len(r.agents()) == 0 })
}

// TestDaemonThawsWhatNobodyElseDoes: the agent and all watchdogs are killed, also those
// of a volume whose last mount has gone.
func TestDaemonThawsWhatNobodyElseDoes(t *testing.T) {
	r := newTestNode(t)
	v, gone := r.staged("pod-1", "ext4"), r.staged("pod-2", "xfs")
	pod, other := r.pod("pod-1"), r.pod("pod-2")
	id := r.run(pod, "main", at(v.target))
	v.wantStats(id)
	gone.wantStats(r.run(other, "main", at(gone.target)))
	v.freeze(5 * time.Second)
	gone.freeze(5 * time.Second)
	for _, pid := range append(r.agents(), r.watchdogs()...) {
		check.Must(t, syscall.Kill(pid, syscall.SIGKILL))
	}
	r.remove(other)
	check.That(t, r.writesIn(id, time.Minute), "frozen for 5 seconds, and a minute later it cannot be written to")
	r.remove(pod)
	v.unstage()
	v.check()
	gone.unstage()
	gone.check()
}

func (v *volume) freeze(timeout time.Duration) {
	v.r.t.Helper()
	check.Must(v.r.t, check.Err(v.r.d.Admin().FreezeVolume(v.r.ctx(), &adminv1.FreezeVolumeRequest{Volume: v.target, Timeout: durationpb.New(timeout)})))
}

// watchdogs lists the processes that thaw what this node has frozen.
func (r *testNode) watchdogs() []int {
	return rig.Processes(func(proc string) bool {
		command, _ := os.ReadFile(proc + "/cmdline")
		program, _ := os.Readlink(proc + "/exe")
		return strings.HasPrefix(program, r.program) && strings.Contains(string(command), "\x00watch-frozen\x00")
	})
}

// crust asks the handler's program, as the daemon does where there is no socket.
func (r *testNode) crust(args ...string) {
	r.t.Helper()
	rig.Command(r.t, r.program, append([]string{"crust"}, args...)...)
}

// writesIn tells whether a write ends in time. One that does not goes on.
func (r *testNode) writesIn(container string, limit time.Duration) bool {
	done := check.Begin(func() error { return check.Err(r.node.Exec(r.ctx(), container, "echo x >> /data/file && sync")) })
	select {
	case err := <-done:
		check.Must(r.t, err)
		return true
	case <-time.After(limit):
		return false
	}
}
