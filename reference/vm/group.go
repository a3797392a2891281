package vm

import (
	"os"
	"runtime"
	"strconv"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crust-proxy/crust-proxy/reference/cgroup"
)

// groupOf is the control group that a bundle asks for. In that of the sandbox are the
// machine and all that serves it; in that of a container are its proxies.
func groupOf(spec *specs.Spec) string {
	if spec.Linux.CgroupsPath == "" {
		return ""
	}
	return cgroup.Path(spec.Linux.CgroupsPath)
}

func (r *record) join(pid int) error {
	if r.Group == "" {
		return nil
	}
	return cgroup.Join(pid, r.Group)
}

// leave removes the group, whose processes have ended or are about to.
func (r *record) leave() error {
	if r.Group == "" {
		return nil
	}
	return cgroup.Remove(r.Group, endTime)
}

// runOutOfMemory has the kernel kill us for the lack of memory, as the guest's kernel has
// killed the container: a kill in the container's group on the host is all that containerd
// would believe. Where the kernel does not, we return.
func runOutOfMemory(group string) {
	const limit = 64 << 20 // more than we and others in the group have
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
	grown := make([]byte, 4*limit)
	for i := 0; i < len(grown); i += os.Getpagesize() {
		grown[i] = 1
	}
	runtime.KeepAlive(grown)
}
