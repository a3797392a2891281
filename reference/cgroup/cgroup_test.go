package cgroup

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// machine is a tree of files in which process 7 is in the given groups.
func machine(t *testing.T, groups, mounts string) (proc, sys string) {
	t.Helper()
	top := t.TempDir()
	proc, sys = top+"/proc", top+"/sys"
	write(t, proc+"/7/cgroup", groups)
	write(t, proc+"/self/mountinfo", strings.ReplaceAll(mounts, "SYS", sys))
	return proc, sys
}

func write(t *testing.T, path, text string) {
	t.Helper()
	check.Must(t, os.MkdirAll(filepath.Dir(path), 0o755))
	check.Must(t, os.WriteFile(path, []byte(text), 0o600))
}

func read(t *testing.T, path string) string {
	t.Helper()
	raw, err := os.ReadFile(path)
	check.Require(t, err == nil || os.IsNotExist(err), "%v", err)
	return string(raw)
}

const (
	unified = "30 20 0:26 / SYS/unified rw - cgroup2 cgroup2 rw,nsdelegate\n"
	pids    = "31 20 0:27 / SYS/pids rw - cgroup cgroup rw,pids\n"
	cpu     = "32 20 0:28 / SYS/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
	cpuset  = "33 20 0:29 / SYS/cpuset rw - cgroup cgroup rw,cpuset\n"
	named   = "34 20 0:30 / SYS/systemd rw - cgroup cgroup rw,xattr,name=systemd\n"
	nested  = "35 20 0:31 /docker/x SYS/unified rw - cgroup2 cgroup2 rw\n"
)

func TestMove(t *testing.T) {
	for name, c := range map[string]struct {
		groups, mounts string
		moved          string // into which of the hierarchies, in order
		failure        string
	}{
		"v2":                     {"0::/kubepods/pod1\n", unified, "unified", ""},
		"v1":                     {"3:cpu,cpuacct:/kubepods/a\n2:pids:/kubepods/a\n1:name=systemd:/kubepods/a\n", pids + cpu + named, "cpu,cpuacct pids systemd", ""},
		"hybrid":                 {"2:pids:/a\n0::/a\n", unified + pids, "pids unified", ""},
		"in the root":            {"2:pids:/\n0::/\n", "", "", ""},
		"some in the root":       {"2:pids:/\n0::/a\n", unified + pids, "unified", ""},
		"there already":          {"2:pids:/own\n0::/own\n", "", "", ""},
		"in a container":         {"0::/docker/x/pod\n", nested, "unified", ""},
		"there in a container":   {"0::/docker/x/own\n", nested, "", ""},
		"top of a container":     {"0::/docker/x\n", nested, "", ""},
		"not mounted":            {"2:pids:/a\n0::/a\n", unified, "unified", "pids:/a: its hierarchy is not mounted"},
		"not what it looks like": {"2:cpu:/a\n", cpuset, "", "not mounted"},
		"unreadable":             {"nonsense\n", unified, "", "cannot be read"},
	} {
		t.Run(name, func(t *testing.T) {
			proc, sys := machine(t, c.groups, c.mounts)
			for _, hierarchy := range strings.Fields(c.moved) {
				write(t, filepath.Join(sys, hierarchy, "own/cgroup.procs"), "") // the kernel makes that
			}
			err := move(proc, 7, "own")
			check.That(t, (err == nil) == (c.failure == "") && (err == nil || strings.Contains(err.Error(), c.failure)), "the error is %v", err)
			all, _ := filepath.Glob(sys + "/*/own")
			var moved []string
			for _, group := range all {
				check.Equal(t, read(t, group+"/cgroup.procs"), "7", "in %s", group)
				moved = append(moved, filepath.Base(filepath.Dir(group)))
			}
			check.Equal(t, strings.Join(moved, " "), c.moved, "moved in")
		})
	}
}

// A new cpuset of v1 takes no process before it has processors and memory.
func TestMoveGivesACpusetWhatItNeeds(t *testing.T) {
	proc, sys := machine(t, "2:cpuset:/a\n", cpuset)
	for file, text := range map[string]string{
		"cpuset.cpus": "0-3\n", "cpuset.mems": "0\n", "own/cpuset.cpus": "\n", "own/cpuset.mems": "1\n", "own/cgroup.procs": "",
	} {
		write(t, sys+"/cpuset/"+file, text)
	}
	check.Must(t, move(proc, 7, "own"))
	for file, want := range map[string]string{"cpuset.cpus": "0-3\n", "cpuset.mems": "1\n", "cgroup.procs": "7"} {
		check.Equal(t, read(t, sys+"/cpuset/own/"+file), want, "%s", file)
	}
}

func TestMoveOfAProcessThatHasEnded(t *testing.T) {
	proc, _ := machine(t, "0::/a\n", unified)
	check.Must(t, move(proc, 8, "own"))
}

// A directory without what the kernel puts there is not a control group.
func TestMoveIntoWhatIsNoControlGroup(t *testing.T) {
	proc, sys := machine(t, "0::/a\n", unified)
	check.Must(t, os.MkdirAll(sys, 0o755))
	write(t, sys+"/unified", "a file")
	check.Fails(t, move(proc, 7, "own"), "/a")
}

func TestPath(t *testing.T) {
	for in, want := range map[string]string{
		"":                             "",
		"/kubepods/burstable/podx/abc": "/kubepods/burstable/podx/abc",
		"kubepods/podx":                "/kubepods/podx",
		"../../etc":                    "/etc",
		"kubepods-burstable-podx_y.slice:cri-containerd:abc": "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podx_y.slice/cri-containerd-abc.scope",
		"system.slice::abc":   "/system.slice/abc.scope",
		"-.slice:cri:abc":     "/cri-abc.scope",
		"a.slice:cri:b.slice": "/a.slice/b.slice",
	} {
		check.Equal(t, Path(in), want, "%s", in)
	}
}

// Every group on the way to one has what it takes; a hierarchy that may only be read is nobody's affair.
func TestEnter(t *testing.T) {
	proc, sys := machine(t, "", cpuset+"36 20 0:32 / SYS/other ro - cgroup cgroup rw,pids\n")
	check.Must(t, os.MkdirAll(sys+"/cpuset/pod/one", 0o755)) //nolint:gosec // as the kernel's own
	for file, text := range map[string]string{
		"cpuset.cpus": "0-3\n", "cpuset.mems": "0\n", "pod/cpuset.cpus": "\n", "pod/cpuset.mems": "\n",
		"pod/one/cpuset.cpus": "\n", "pod/one/cpuset.mems": "\n",
	} {
		write(t, sys+"/cpuset/"+file, text)
	}
	mounts := check.Value(writable(proc))(t)
	check.Require(t, len(mounts) == 1, "there are %d hierarchies", len(mounts))
	check.Must(t, enter(mounts[0], "/pod/one", 7))
	for file, want := range map[string]string{"pod/cpuset.cpus": "0-3\n", "pod/one/cpuset.cpus": "0-3\n", "pod/one/cgroup.procs": "7"} {
		check.Equal(t, read(t, sys+"/cpuset/"+file), want, "%s", file)
	}
}
