//go:build system

package vm

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
)

// TestControlGroups: the machine counts as its pod's, as kubelet's limits and figures want
// it. What runs out of memory in the guest has done so for containerd; nothing is left.
func TestControlGroups(t *testing.T) {
	b := newBench(t)
	pod := b.pod("pod-groups")
	id := b.run(pod, "main")
	sandbox := b.CRI.Group + "/pod" + pod.UID + "/" + pod.ID
	supervisor, err := pod.Pid(b.ctx())
	check.Must(t, err)
	nodes, err := os.Readlink("/proc/self/ns/net")
	check.Must(t, err)
	for _, pid := range rig.Processes(func(proc string) bool {
		of, _ := strconv.Atoi(filepath.Base(proc))
		parent, err := rig.Parent(of)
		return of == supervisor || err == nil && parent == supervisor
	}) {
		b.wantGroup(pid, sandbox)
		if net, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", pid)); pid != supervisor && (err != nil || net == nodes) {
			t.Errorf("process %d of the machine has the node's network: %s, %v", pid, net, err)
		}
	}
	proxy, err := b.CRI.Pid(b.ctx(), id)
	check.Must(t, err)
	b.wantGroup(proxy, b.CRI.Group+"/pod"+pod.UID+"/"+id)
	if used := b.memory(sandbox); used < 100*mib {
		t.Errorf("the pod's machine has %d bytes", used)
	}

	for name, limit := range map[string]int64{"limited": 32 * mib, "unlimited": 0} { // by the machine's memory alone
		hungry, err := pod.Run(b.ctx(), cri.Container{Name: name, Memory: limit, Script: "exec tail /dev/zero"})
		check.Must(t, err)
		check.Eventually(t, "containerd reports that the container "+name+" ran out of memory", func() bool {
			reply, err := b.CRI.CRI.ContainerStatus(b.ctx(), &runtimeapi.ContainerStatusRequest{ContainerId: hungry})
			return err == nil && reply.GetStatus().GetExitCode() == 137 && reply.GetStatus().GetReason() == "OOMKilled"
		})
		b.exec(id, "true")
	}
	b.remove(pod)
	check.Eventually(t, "no control group is left", func() bool { return len(rig.GroupDirs(b.CRI.Group+"/pod"+pod.UID)) == 0 })
	b.WantClean(t)
}

// wantGroup wants a process to be in a control group of each hierarchy.
func (b *bench) wantGroup(pid int, group string) {
	b.t.Helper()
	raw, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "cgroup"))
	check.Must(b.t, err)
	for line := range strings.Lines(string(raw)) {
		if !strings.HasSuffix(strings.TrimSpace(line), ":"+group) {
			b.t.Errorf("%s is in %q and not in %s", rig.DescribeProcess(pid), line, group)
		}
	}
}

// memory is what a control group uses.
func (b *bench) memory(group string) (bytes int64) {
	b.t.Helper()
	for _, dir := range rig.GroupDirs(group) {
		for _, file := range []string{"/memory.usage_in_bytes", "/memory.current"} {
			if raw, err := os.ReadFile(dir + file); err == nil {
				used, err := strconv.ParseInt(strings.TrimSpace(string(raw)), 10, 64)
				check.Must(b.t, err)
				bytes += used
			}
		}
	}
	return bytes
}
