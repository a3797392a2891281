package cri

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crust-proxy/crust-proxy/test/rig"
)

// goneTime is how long processes and mounts of removed pods may take to go.
const goneTime = 10 * time.Second

// Close removes all pods, says what they left although they were removed, and
// takes away everything, whatever happened before.
func (n *Node) Close() error {
	var problems []error
	if n.cmd != nil {
		problems = append(problems, n.removePods(), n.wantNothingLeft())
	}
	n.Kill()
	problems = append(problems, n.endProcesses())
	removeGroups(n.group)
	for _, point := range []string{"/run", n.Dir} {
		problems = append(problems, rig.Unmount(point))
	}
	problems = append(problems, os.RemoveAll(n.Dir))
	return errors.Join(problems...)
}

func (n *Node) removePods() error {
	ctx := context.Background()
	reply, err := n.CRI.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
	problems := []error{err}
	for _, sandbox := range reply.GetItems() {
		_, err := n.CRI.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: sandbox.GetId()})
		problems = append(problems, err)
		_, err = n.CRI.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: sandbox.GetId()})
		problems = append(problems, err)
		removeGroups(n.group + "/pod" + sandbox.GetMetadata().GetUid())
	}
	return errors.Join(problems...)
}

func (n *Node) wantNothingLeft() error {
	var left []string
	for deadline := time.Now().Add(goneTime); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if left = n.Left(); len(left) == 0 {
			return nil
		}
	}
	if n.wasKilled && n.endForgottenShims() {
		time.Sleep(goneTime / 10)
		left = n.Left()
	}
	if len(left) == 0 {
		return nil
	}
	return fmt.Errorf("LEAKED by pods that were removed: %s", strings.Join(left, "; "))
}

// endForgottenShims ends the shims that containerd has forgotten: one that it had
// started a moment before it was killed, and whose container never came to be, is on
// no record of it. That is containerd's leak and not that of whom the tests are about,
// who would have left a container or a mount.
func (n *Node) endForgottenShims() bool {
	found := false
	for _, pid := range n.processes() {
		command, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		program, _, _ := bytes.Cut(command, []byte{0})
		if filepath.Base(string(program)) != "containerd-shim-runc-v2" || hasChildren(pid) {
			continue
		}
		fmt.Fprintf(os.Stderr, "containerd was killed, and has forgotten a shim without a container: %q\n", command)
		found = syscall.Kill(pid, syscall.SIGKILL) == nil || found
	}
	return found
}

func hasChildren(pid int) bool {
	parent := fmt.Sprintf("\nPPid:\t%d\n", pid)
	all, _ := filepath.Glob("/proc/[0-9]*/status")
	return slices.ContainsFunc(all, func(file string) bool {
		status, _ := os.ReadFile(file) //nolint:gosec // a process that has ended meanwhile has no file
		return bytes.Contains(status, []byte(parent))
	})
}

// Left lists what pods have on the node: processes, mounts, control groups. It
// is empty when there are no pods.
func (n *Node) Left() []string {
	var left []string
	for _, pid := range n.processes() {
		command, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		left = append(left, fmt.Sprintf("process %d %q", pid, bytes.ReplaceAll(command, []byte{0}, []byte{' '})))
	}
	for _, point := range append(rig.MountPoints(n.Dir), rig.MountPoints("/run")...) {
		if point != n.Dir && point != "/run" {
			left = append(left, "mount "+point)
		}
	}
	for _, group := range groups(n.group) {
		below, _ := os.ReadDir(group)
		for _, one := range below {
			if one.IsDir() {
				left = append(left, "control group "+filepath.Join(group, one.Name()))
			}
		}
	}
	return left
}

// endProcesses kills what a test has left.
func (n *Node) endProcesses() error {
	for range 250 {
		left := n.processes()
		if len(left) == 0 {
			return nil
		}
		for _, pid := range left {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		time.Sleep(20 * time.Millisecond)
	}
	return fmt.Errorf("LEAKED: processes that cannot be killed: %v", n.processes())
}

// processes lists shims, containers and what the handlers' programs have started.
// A shim has our directory in its command line, a container has a control group
// of ours.
func (n *Node) processes() []int {
	var out []int
	entries, _ := filepath.Glob("/proc/[0-9]*")
	for _, proc := range entries {
		pid, err := strconv.Atoi(filepath.Base(proc))
		if err != nil || pid <= 1 || pid == os.Getpid() || (n.cmd != nil && pid == n.cmd.Process.Pid) {
			continue
		}
		if n.isOurs(proc) {
			out = append(out, pid)
		}
	}
	return out
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
	return bytes.Contains(command, []byte(n.Dir)) || bytes.Contains(inGroups, []byte(n.group+"/"))
}

// groups gives a control group's directories: one, or one for each controller.
func groups(group string) []string {
	found, _ := filepath.Glob("/sys/fs/cgroup/*" + group)
	if one := "/sys/fs/cgroup" + group; exists(one) {
		found = append(found, one)
	}
	return found
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// removeGroups removes a control group with those below it.
func removeGroups(group string) {
	for _, root := range groups(group) {
		var dirs []string
		_ = filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
			if err == nil && entry.IsDir() {
				dirs = append(dirs, path)
			}
			return nil
		})
		for _, dir := range slices.Backward(dirs) {
			_ = os.Remove(dir)
		}
	}
}
