package cgroup

import (
	"os"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestPath(t *testing.T) {
	for in, want := range map[string]string{
		"/kubepods/burstable/podx/abc": "/kubepods/burstable/podx/abc",
		"kubepods/podx":                "/kubepods/podx",
		"../../etc":                    "/etc",
		"kubepods-burstable-podx_y.slice:cri-containerd:abc": "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podx_y.slice/cri-containerd-abc.scope",
		"system.slice::abc":   "/system.slice/abc.scope",
		"-.slice:cri:abc":     "/cri-abc.scope",
		"a.slice:cri:b.slice": "/a.slice/b.slice",
	} {
		if got := Path(in); got != want {
			t.Errorf("%s is %s, not %s", in, got, want)
		}
	}
}

// Every group on the way to one has what it takes; a hierarchy that may only be read is
// nobody's affair.
func TestEnter(t *testing.T) {
	proc, sys := machine(t, "", cpuset+"36 20 0:32 / SYS/other ro - cgroup cgroup rw,pids\n")
	check.Must(t, os.MkdirAll(sys+"/cpuset/pod/one", 0o755)) //nolint:gosec // as the kernel's own
	for file, text := range map[string]string{
		"cpuset.cpus": "0-3\n", "cpuset.mems": "0\n", "pod/cpuset.cpus": "\n", "pod/cpuset.mems": "\n",
		"pod/one/cpuset.cpus": "\n", "pod/one/cpuset.mems": "\n",
	} {
		write(t, sys+"/cpuset/"+file, text)
	}
	mounts, err := writable(proc)
	check.Must(t, err)
	if len(mounts) != 1 {
		t.Fatalf("there are %d hierarchies", len(mounts))
	}
	check.Must(t, enter(mounts[0], "/pod/one", 7))
	for file, want := range map[string]string{"pod/cpuset.cpus": "0-3\n", "pod/one/cpuset.cpus": "0-3\n", "pod/one/cgroup.procs": "7"} {
		if got := read(t, sys+"/cpuset/"+file); got != want {
			t.Errorf("%s is %q, want %q", file, got, want)
		}
	}
}
