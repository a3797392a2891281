package cri

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// goneTime is how long processes and mounts of removed pods may take to go.
const goneTime = 30 * time.Second

// close removes all pods, says what they left although they were removed, and
// takes away everything, whatever happened before.
func (n *Node) close() error {
	var problems []error
	if n.Process.Alive() {
		problems = append(problems, n.RemovePods(), n.wantNothingLeft())
	}
	n.Process.Kill()
	problems = append(problems, rig.KillAll(n.processes), rig.RemoveGroup(n.Group))
	for _, point := range []string{"/run", n.Dir} {
		problems = append(problems, rig.Unmount(point))
	}
	return errors.Join(append(problems, os.RemoveAll(n.Dir))...)
}

// RemovePods removes all pods.
func (n *Node) RemovePods() error {
	ctx := context.Background()
	reply, err := n.CRI.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
	problems := []error{err}
	for _, sandbox := range reply.GetItems() {
		pod := &Pod{ID: sandbox.GetId(), UID: sandbox.GetMetadata().GetUid(), node: n}
		problems = append(problems, pod.Remove(ctx))
	}
	return errors.Join(problems...)
}

func (n *Node) wantNothingLeft() error {
	left := check.Left(goneTime, 10*time.Millisecond, func() []string {
		removePodGroups(n.Group)
		return n.Left()
	})
	if len(left) == 0 {
		return nil
	}
	if n.Process.Starts() > 1 && endForgottenShims(n.processes()) {
		time.Sleep(goneTime / 10)
		left = n.Left()
	}
	if n.ShimsAreKilled && slices.ContainsFunc(left, n.isRoot) {
		fmt.Fprintf(os.Stderr, "containerd has left root filesystems of killed shims: %q\n", left)
		left = slices.DeleteFunc(left, n.isRoot)
	}
	if len(left) == 0 {
		return nil
	}
	return fmt.Errorf("LEAKED by pods that were removed: %s", strings.Join(left, "; "))
}

// isRoot tells whether what was left is the mount of a container's root filesystem.
func (n *Node) isRoot(left string) bool {
	return strings.HasPrefix(left, "mount "+n.Dir) && strings.HasSuffix(left, "/rootfs")
}

// removePodGroups removes the empty control groups of pods, as kubelet does again and again.
func removePodGroups(parent string) {
	for _, dir := range rig.GroupDirs(parent) {
		if filepath.Base(filepath.Dir(dir)) == filepath.Base(parent) {
			_ = os.Remove(dir) // not one that has others in it
		}
	}
}

// endForgottenShims ends the shims that containerd has forgotten: one that it had started a moment before it was
// stopped, and whose container never came to be, is on no record of it. That is containerd's leak and not that of whom
// the tests are about, who would have left a container or a mount.
func endForgottenShims(pids []int) bool {
	found := false
	for _, pid := range pids {
		command, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		program, _, _ := bytes.Cut(command, []byte{0})
		if filepath.Base(string(program)) != "containerd-shim-runc-v2" || len(rig.Children(pid)) > 0 {
			continue
		}
		fmt.Fprintf(os.Stderr, "containerd was stopped, and has forgotten a shim without a container: %q\n", command)
		found = syscall.Kill(pid, syscall.SIGKILL) == nil || found
	}
	return found
}

// Left lists what pods have on the node: processes, mounts, control groups. It is empty when there are no pods.
func (n *Node) Left() []string {
	var left []string
	for _, pid := range n.processes() {
		left = append(left, rig.DescribeProcess(pid))
	}
	for _, point := range append(rig.MountPoints(n.Dir), rig.MountPoints("/run")...) {
		if point != n.Dir && point != "/run" && !slices.Contains(n.before, point) {
			left = append(left, "mount "+point)
		}
	}
	for _, dir := range rig.GroupDirs(n.Group) {
		if filepath.Base(dir) != filepath.Base(n.Group) {
			left = append(left, "control group "+dir)
		}
	}
	return left
}

// processes lists shims, containers and what the handlers' programs have started. A shim has our directory in its
// command line, a container has a control group of ours.
func (n *Node) processes() []int {
	all := rig.Processes(n.isOurs)
	return slices.DeleteFunc(all, func(pid int) bool {
		return pid <= 1 || pid == os.Getpid() || (n.Process.Alive() && pid == n.Process.Pid())
	})
}

func (n *Node) isOurs(proc string) bool {
	// A zombie has no command line, and is its parent's affair.
	command, _ := os.ReadFile(proc + "/cmdline")
	if len(command) == 0 {
		return false
	}
	inGroups, _ := os.ReadFile(proc + "/cgroup")
	program, _ := os.Readlink(proc + "/exe")
	for _, handler := range n.opts.Handlers {
		if strings.HasPrefix(program, handler) { // crust-runc-agent as well
			return true
		}
	}
	if n.opts.Others != nil && n.opts.Others(proc) {
		return true
	}
	return bytes.Contains(command, []byte(n.Dir)) || bytes.Contains(inGroups, []byte(n.Group+"/"))
}
