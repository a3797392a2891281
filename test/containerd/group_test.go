//go:build system

package containerd

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
)

const (
	groupID   = 2000
	treeDirs  = 30
	treeFiles = 1000 // in each directory
)

// makeTree makes 30,000 files, and beside them a link that leads out.
func makeTree(t testing.TB, dir, outside string) {
	t.Helper()
	for d := range treeDirs {
		sub := filepath.Join(dir, "tree", strconv.Itoa(d))
		check.Must(t, os.MkdirAll(sub, 0o700))
		for f := range treeFiles {
			fd := check.Value(unix.Open(sub+"/"+strconv.Itoa(f), unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o600))(t)
			check.Must(t, unix.Close(fd))
		}
	}
	check.Must(t, os.Symlink(outside, dir+"/link"))
}

// wrong lists files of the tree that the group cannot have.
func wrong(t testing.TB, dir string) (out []string) {
	t.Helper()
	check.Must(t, filepath.WalkDir(filepath.Join(dir, "tree"), func(path string, entry fs.DirEntry, err error) error {
		var st unix.Stat_t
		if err == nil {
			err = unix.Lstat(path, &st)
		}
		want := uint32(0o060)
		if err == nil && entry.IsDir() {
			want = unix.S_ISGID | 0o070
		}
		if st.Gid != groupID || st.Mode&want != want {
			out = append(out, fmt.Sprintf("%s: group %d, mode %o", path, st.Gid, st.Mode))
		}
		return err
	}))
	return out
}

// TestGroupOutlivesAKilledAttempt: what takes longer than the container runtime waits is
// done all the same, and ends with the sandbox.
func TestGroupOutlivesAKilledAttempt(t *testing.T) {
	r, where := newKilledNode(t)
	v := r.volume("pod-1", "xfs", 2*diskSize)
	v.group = strconv.Itoa(groupID)
	v.onHost(func(dir string) { makeTree(t, dir, "/outside") })
	v.stage()
	pod := r.pod(v.pod)
	r.killedInTheGroup(pod, v, where)
	// What mounts a volume once more dies here.
	check.Must(t, os.WriteFile(where, []byte("crust-runc-mounted"), 0o600))
	id := check.Value(pod.Run(r.ctx(), cri.Container{
		Name: "main", Attempt: 1, Mounts: []cri.Mount{at(v.target)}, User: 1000, Groups: []int64{groupID},
	}))(t)
	check.Must(t, os.Remove(where))
	r.exec(id, "echo mine > /data/tree/29/999")
	r.remove(pod)
	v.unstage()
	v.onHost(func(dir string) {
		left := wrong(t, dir)
		check.That(t, len(left) == 0, "%d files are wrong, first %q", len(left), left[:min(len(left), 1)])
	})

	v.pod, v.group = "pod-2", strconv.Itoa(groupID+1)
	v.stage()
	pod = r.pod(v.pod)
	r.killedInTheGroup(pod, v, where)
	walks := stopped("attach-with-group")
	r.remove(pod)
	for _, pid := range walks {
		check.Must(t, unix.Kill(pid, unix.SIGCONT))
	}
	v.unstage()
	v.onHost(func(dir string) {
		all := treeDirs*(treeFiles+1) + 1
		check.That(t, len(walks) == 0 || len(wrong(t, dir)) != all, "all files were given to the group of a sandbox that had ended")
	})
	v.check()
	r.wantClean()
}

// stopped stops the processes that have a word on their command line.
func stopped(word string) []int {
	pids := rig.Processes(func(proc string) bool {
		command, _ := os.ReadFile(proc + "/cmdline")
		return slices.Contains(strings.Split(string(command), "\x00"), word)
	})
	return slices.DeleteFunc(pids, func(pid int) bool { return unix.Kill(pid, unix.SIGSTOP) != nil }) // it has ended
}

// killedInTheGroup has crust-runc be killed when it has waited for long.
func (r *testNode) killedInTheGroup(pod *cri.Pod, v *volume, where string) {
	r.t.Helper()
	check.Must(r.t, os.WriteFile(where, []byte("crust-runc-group=sleep:20s,crust-runc-group-started"), 0o600))
	check.Fails(r.t, check.Err(pod.Run(r.ctx(), cri.Container{Name: "main", Mounts: []cri.Mount{at(v.target)}}))) // or the container runs, and crust-runc was to die
	check.Must(r.t, os.Remove(where))
}
