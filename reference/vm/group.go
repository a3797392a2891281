package vm

import (
	"os"
	"runtime"
	"strconv"

	"github.com/crust-proxy/crust-proxy/reference/cgroup"
)

// removeGroup removes the group, whose processes have ended or are about to end. A QEMU that was taken over may not be.
func (r *record) removeGroup() error {
	if cgroup.Remove(r.Group, proxyEndTimeout) == nil {
		return nil
	}
	cgroup.Kill(r.Group)
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
