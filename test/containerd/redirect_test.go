//go:build system

package containerd

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
)

// TestASandboxesVolumesAreHeldApart has root in a pod change what it reaches of its
// sandbox's /dev by /proc/PID/root, where the containers share a process namespace.
func TestASandboxesVolumesAreHeldApart(t *testing.T) {
	r := newTestNode(t)
	for _, fs := range []string{"ext4", "btrfs"} {
		t.Run(fs, func(t *testing.T) { r.of(t).redirected(fs) })
	}
	r.wantClean()
}

func (r *testNode) redirected(fs string) {
	r.t.Helper()
	v, other := r.volume("pod-1", fs, diskSize), r.volume("pod-1", fs, diskSize)
	other.name = "pv-2"
	v.stage()
	other.stage()
	pod := r.pod(v.pod)
	id := r.run(pod, "main", at(v.target), cri.Mount{Host: other.target, Container: "/other"})
	r.wantAttributes(pod, v, id)
	v.wantStats(id)

	// What a pod can have frozen is on the node: a filesystem of somebody else.
	theirs := r.volume("nobody", fs, diskSize)
	host := r.t.TempDir()
	volume := abi.DirName(v.target)
	check.Must(r.t, os.Mkdir(host+"/"+volume, 0o700))
	check.Must(r.t, unix.Mount(theirs.disk, host+"/"+volume, fs, 0, ""))
	defer func() { _ = unix.Unmount(host+"/"+volume, unix.MNT_DETACH) }()

	dev := fmt.Sprintf("/proc/%d/root/dev", r.pause(pod, v))
	places := dev + "/crust"
	check.Must(r.t, os.Rename(places, dev+"/kept"))
	for name, to := range map[string]string{"a link to the node": host, "a link by proc": "/proc/1/root" + host} {
		check.Must(r.t, os.Symlink(to, places))
		r.wantNothingFrom(v, name)
		r.refusesContainer(pod, v, name)
		check.Must(r.t, os.Remove(places))
	}
	check.Must(r.t, os.Rename(dev+"/kept", places))
	// The mount points of two volumes are changed for each other, as seen from another
	// mount namespace, where they are none.
	swap := func() {
		check.Must(r.t, unix.Renameat2(unix.AT_FDCWD, places+"/"+volume, unix.AT_FDCWD, places+"/"+abi.DirName(other.target), unix.RENAME_EXCHANGE))
	}
	swap()
	r.wantNothingFrom(v, "another volume")
	r.refusesContainer(pod, v, "another volume")
	swap()

	v.wantStats(id)
	r.crust("freeze", v.target, "60")
	r.crust("thaw", v.target)
	check.Must(r.t, os.WriteFile(host+"/"+volume+"/file", nil, 0o600))
	check.Must(r.t, unix.Unmount(host+"/"+volume, 0))
	r.remove(pod)
	v.unstage()
	other.unstage()
}

// wantNothingFrom fails where anything is done to the filesystem that is found in the place of a volume's.
func (r *testNode) wantNothingFrom(v *volume, what string) {
	r.t.Helper()
	for _, args := range [][]string{{"stats", v.target}, {"resize", v.target, "0", "0"}, {"freeze", v.target, "60"}} {
		out, err := exec.Command(r.program, append([]string{"crust"}, args...)...).CombinedOutput()
		check.That(r.t, err != nil && strings.Contains(string(out), "delete the pod"), "%s: %s: %v\n%s", what, args[0], err, out)
	}
	check.That(r.t, check.Err(v.stats()) != nil, "%s: the agent answers for it", what)
}

func (r *testNode) refusesContainer(pod *cri.Pod, v *volume, what string) {
	r.t.Helper()
	_, err := pod.Run(r.ctx(), cri.Container{Name: strings.ReplaceAll(what, " ", "-"), Mounts: []cri.Mount{at(v.target)}})
	check.That(r.t, err != nil && strings.Contains(err.Error(), "place"), "%s: a container: %v", what, err)
}

// pause is the process of the sandbox, by what crust-runc noted.
func (r *testNode) pause(pod *cri.Pod, v *volume) int {
	r.t.Helper()
	raw := check.Value(os.ReadFile(filepath.Join(abi.DefaultRoot, abi.DirName(v.target), pod.ID)))(r.t)
	var note struct{ PID int }
	check.Must(r.t, json.Unmarshal(raw, &note))
	return note.PID
}

// wantAttributes compares the mount that the sandbox keeps with the container's.
func (r *testNode) wantAttributes(pod *cri.Pod, v *volume, container string) {
	r.t.Helper()
	raw := check.Value(os.ReadFile(fmt.Sprintf("/proc/%d/mounts", r.pause(pod, v))))(r.t)
	kept := ""
	for line := range strings.SplitSeq(string(raw), "\n") {
		if strings.Contains(line, " /dev/crust/"+abi.DirName(v.target)+" ") {
			kept = line
		}
	}
	check.That(r.t, strings.Contains(kept, "nosuid") && strings.Contains(kept, "nodev"), "the sandbox keeps %q", kept)
	shown := r.exec(container, "grep ' /data ' /proc/mounts")
	check.That(r.t, !strings.Contains(shown, "nosuid") && !strings.Contains(shown, "nodev"), "the container has %q", shown)
}
