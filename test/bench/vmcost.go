package main

import (
	"bytes"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
)

const mib = 1 << 20

// memoryGroup is the control group that counts a process's memory, and the kernel's for it.
func (p vmProcesses) memoryGroup(pid int) string {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	p.r.must(err)
	for line := range strings.Lines(string(raw)) {
		at := strings.SplitN(strings.TrimSpace(line), ":", 3)
		for _, root := range []string{"/sys/fs/cgroup/", "/sys/fs/cgroup/memory/"} {
			if _, err := os.Stat(root + at[2] + "/memory.stat"); err == nil && (at[1] == "memory" || at[1] == "") {
				return root + at[2]
			}
		}
	}
	p.r.t.Fatalf("no control group counts memory: %s", raw)
	return ""
}

// vmProcesses are those of a machine on the host.
type vmProcesses struct {
	r         *testbed
	group     string
	qemu      int
	virtiofsd []int
	kvm       bool
}

func (b *vmTestbed) processes(pod *cri.Pod) vmProcesses {
	p := vmProcesses{r: b.r}
	var err error
	p.qemu, err = b.n.Machine(b.r.ctx, pod)
	b.r.must(err)
	command, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", p.qemu))
	b.r.must(err)
	p.kvm = bytes.Contains(command, []byte("\x00kvm\x00"))
	p.virtiofsd = rig.Processes(func(proc string) bool {
		command, _ := os.ReadFile(proc + "/cmdline")
		return bytes.Contains(command, []byte("virtiofsd\x00")) && bytes.Contains(command, []byte(b.n.State))
	})
	if len(p.virtiofsd) == 0 {
		b.r.t.Fatal("the machine has no virtiofsd")
	}
	p.group = p.memoryGroup(p.virtiofsd[0])
	return p
}

// pss is memory in MiB. Of what processes share each has its part.
func (p vmProcesses) pss(pids ...int) (sum float64) {
	for _, pid := range pids {
		sum += p.r.fields(fmt.Sprintf("/proc/%d/smaps_rollup", pid))["Pss:"] / 1024
	}
	return sum
}

// pageCache knows both versions of control groups by their words for it. The guest's memory
// is a file, but not meant here.
func (p vmProcesses) pageCache() float64 {
	stat := p.r.fields(p.group + "/memory.stat")
	return (stat["cache"] + stat["file"] - stat["shmem"]) / mib
}

// kernel is the memory of the kernel's objects.
func (p vmProcesses) kernel() float64 {
	if raw, err := os.ReadFile(p.group + "/memory.kmem.usage_in_bytes"); err == nil {
		var bytes float64
		_, err := fmt.Sscan(string(raw), &bytes)
		p.r.must(err)
		return bytes / mib
	}
	return p.r.fields(p.group + "/memory.stat")["slab"] / mib
}

// seconds are those of the processor.
func (p vmProcesses) seconds(pids ...int) (sum float64) {
	for _, pid := range pids {
		sum += rig.CPUTime(p.r.t, pid).Seconds()
	}
	return sum
}

// cost is what the host has spent beside the guest's own work.
func (p vmProcesses) cost() map[string]float64 {
	unix.Sync() // what waits to be written is no cost for long
	descriptors := 0
	for _, pid := range p.virtiofsd {
		descriptors += len(rig.FDs(p.r.t, pid))
	}
	return map[string]float64{
		"virtiofsd": p.seconds(p.virtiofsd...), "qemu": p.seconds(p.qemu),
		"descriptors": float64(descriptors), "kernel": p.kernel(), "page cache": p.pageCache(),
	}
}
