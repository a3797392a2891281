//go:build system

package containerd

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
)

// whoami is a program that says who runs it, and stays where it is asked to.
const whoami = `package main

import ("fmt"; "os"; "time")

func main() {
	fmt.Println(os.Getuid(), os.Geteuid())
	if len(os.Args) > 1 { time.Sleep(time.Hour) }
}
`

// buildWhoami builds it without libraries, which containers do not have.
func buildWhoami(t *testing.T) (program string) {
	t.Helper()
	dir := t.TempDir()
	check.Must(t, os.WriteFile(dir+"/whoami.go", []byte(whoami), 0o600))
	build := exec.Command("go", "build", "-o", dir+"/whoami", dir+"/whoami.go")
	build.Env = append(os.Environ(), "CGO_ENABLED=0", "GO111MODULE=off")
	check.Run(t, build)
	return dir + "/whoami"
}

// attemptAs runs a sandbox with a user namespace.
func (r *testNode) attemptAs(uid string, attempt, root uint32) *cri.Pod {
	r.t.Helper()
	return check.Value(r.node.RunPod(r.ctx(), uid, "crust", attempt, cri.Users(root)))(r.t)
}

// TestUserNamespaces runs pods whose root is nobody on the node.
func TestUserNamespaces(t *testing.T) {
	r := newTestNode(t)
	program := buildWhoami(t)
	for _, fs := range rig.Sample(filesystems, 2) {
		t.Run(fs, func(t *testing.T) {
			u := &usersTest{testNode: r.of(t), program: program}
			u.lives(fs)
		})
	}
	r.wantClean()
}

// usersTest is one volume in pods with user namespaces.
type usersTest struct {
	*testNode
	program string
	v       *volume
}

const firstRoot, secondRoot = 200000, 300000

// lives has two attempts of a pod, each with other users, use one volume: what is on the
// device belongs to the pod's own users, whoever they are on the node.
func (u *usersTest) lives(fs string) {
	u.t.Helper()
	u.v = u.volume("pod-"+fs, fs, diskSize)
	u.fill()
	u.v.group = strconv.Itoa(groupID)
	u.v.stage()
	pod := u.attemptAs(u.v.pod, 0, firstRoot)
	id := u.run(pod, "main", at(u.v.target))
	u.wantOwners(id, "theirs 1000:2000", "suid 0:2000", ". 0:2000")
	u.exec(id, "touch /data/root && touch /data/given && chown 1234:1234 /data/given")
	u.wantOwners(id, "given 1234:1234")
	member := check.Value(pod.Run(u.ctx(), cri.Container{Name: "member", User: 1000, Groups: []int64{groupID}, Mounts: []cri.Mount{at(u.v.target)}}))(u.t)
	u.exec(member, "touch /data/members")
	u.wantNoHostRoot(pod, id)
	u.v.freeze(time.Minute)
	u.crust("thaw", u.v.target)
	if rig.MayGrow(u.t, fs) {
		rig.Enlarge(u.t, u.v.image, u.v.disk, grownSize)
		check.Must(u.t, check.Err(u.v.expand(grownSize)))
	}
	u.v.wantStats(id)
	u.remove(pod)

	pod = u.attemptAs(u.v.pod, 1, secondRoot)
	id = u.run(pod, "main", at(u.v.target))
	owners := []string{"theirs 1000:2000", "root 0:2000", "given 1234:2000", "members 1000:2000"}
	u.wantOwners(id, owners...)
	u.remove(pod)
	u.v.unstage()
	u.v.onHost(func(dir string) {
		for _, want := range owners {
			name, _, _ := strings.Cut(want, " ")
			var st unix.Stat_t
			check.Must(u.t, unix.Lstat(filepath.Join(dir, name), &st))
			check.Equal(u.t, fmt.Sprintf("%s %d:%d", name, st.Uid, st.Gid), want, "on the device")
		}
	})
	u.v.check()
}

// fill gives the volume a file of a user, and a program that runs as root.
func (u *usersTest) fill() {
	u.t.Helper()
	raw := check.Value(os.ReadFile(u.program))(u.t)
	u.v.onHost(func(dir string) {
		check.Must(u.t, os.WriteFile(dir+"/theirs", nil, 0o600))
		check.Must(u.t, os.Chown(dir+"/theirs", 1000, 1000))
		check.Must(u.t, os.WriteFile(dir+"/suid", raw, 0o755)) //nolint:gosec // it is run by others
		check.Must(u.t, os.Chmod(dir+"/suid", 0o755|os.ModeSetuid))
	})
}

func (r *testNode) wantOwners(container string, owners ...string) {
	r.t.Helper()
	for _, want := range owners {
		name, _, _ := strings.Cut(want, " ")
		got := strings.TrimSpace(r.exec(container, "cd /data && stat -c '%n %u:%g' "+name))
		check.That(r.t, got == want, "in the pod: %q, want %q", got, want)
	}
}

// wantNoHostRoot runs the volume's program of root's: it may make a user of the pod the
// pod's root, and nobody the node's.
func (u *usersTest) wantNoHostRoot(pod *cri.Pod, container string) {
	u.t.Helper()
	u.wantAttributes(pod, u.v, container)
	id := check.Value(pod.Run(u.ctx(), cri.Container{Name: "suid", User: 1000, Script: "exec /data/suid stay", Mounts: []cri.Mount{at(u.v.target)}}))(u.t)
	pid := check.Value(u.node.Pid(u.ctx(), id))(u.t)
	users := fmt.Sprintf("Uid:\t%d\t%d\t%d\t%d\n", firstRoot+1000, firstRoot, firstRoot, firstRoot)
	check.Eventually(u.t, "the program of root's is the pod's root", func() bool {
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		return err == nil && strings.Contains(string(raw), users)
	})
	// Where the containers share a process namespace, root in the pod reaches what the
	// sandbox keeps: its owners are the device's, who are nobody there.
	rig.Need(u.t, "nsenter")
	kept := "/dev/crust/" + abi.DirName(u.v.target)
	inSandbox := func(script string) (string, error) {
		out, err := exec.Command("nsenter", "-t", strconv.Itoa(u.pause(pod, u.v)), "-U", "-m", "-S", "0", "-G", "0", "/bin/sh", "-c", script).CombinedOutput()
		return string(out), err
	}
	out, err := inSandbox(kept + "/suid")
	check.That(u.t, err == nil && out == "0 0\n", "in the sandbox it is run as %q, %v", out, err)
	out, err = inSandbox("echo x > " + kept + "/theirs")
	check.That(u.t, err != nil && strings.Contains(out, "denied"), "the sandbox's mount can be written to: %q, %v", out, err)
}
