package vm

import (
	"os"
	"runtime"
	"strconv"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/reference/cgroup"
)

// groupOf returns the control group that a bundle asks for. The sandbox's group holds the
// machine and the processes that serve it; a container's group holds its proxies.
func groupOf(spec *specs.Spec) string {
	if spec.Linux.CgroupsPath == "" {
		return ""
	}
	return cgroup.Path(spec.Linux.CgroupsPath)
}

func (r *record) joinGroup(pid int) error {
	if r.Group == "" {
		return nil
	}
	return cgroup.Join(pid, r.Group)
}

// removeGroup removes the group, whose processes have ended or are about to end. A QEMU that was taken over may not be.
func (r *record) removeGroup() error {
	if r.Group == "" {
		return nil
	}
	if cgroup.Remove(r.Group, proxyEndTimeout) == nil {
		return nil
	}
	for _, file := range cgroup.Files(r.Group, "cgroup.procs") {
		raw, err := os.ReadFile(file) //nolint:gosec // of a control group
		for pid := range strings.FieldsSeq(string(raw)) {
			if n, convErr := strconv.Atoi(pid); err == nil && convErr == nil && n > 1 {
				_ = unix.Kill(n, unix.SIGKILL)
			}
		}
	}
	return cgroup.Remove(r.Group, killTimeout)
}

// dieOutOfMemory makes the host's kernel kill this process for lack of memory, as the guest's
// kernel killed the container. containerd reports OOMKilled only for a kill in the container's
// group on the host. It returns if the kernel does not kill.
func dieOutOfMemory(group string) {
	const limit = 64 << 20 // more than the processes in the group use
	if group == "" {
		return
	}
	limited := false
	for name, value := range map[string]int{
		"memory.limit_in_bytes": limit, "memory.swappiness": 0, // cgroup v1
		"memory.max": limit, "memory.swap.max": 0,
	} {
		for _, file := range cgroup.Files(group, name) {
			err := os.WriteFile(file, []byte(strconv.Itoa(value)), 0)
			limited = limited || value == limit && err == nil
		}
	}
	if !limited || os.WriteFile("/proc/self/oom_score_adj", []byte("1000"), 0) != nil {
		return
	}
	used := make([]byte, 4*limit)
	for i := 0; i < len(used); i += os.Getpagesize() {
		used[i] = 1
	}
	runtime.KeepAlive(used)
}
