//go:build system

package front

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/kata"
)

// wantRemovable runs the check, and wants this exit code and these words.
func (n *node) wantRemovable(want int, words []string, args ...string) {
	n.t.Helper()
	cmd := exec.Command(rig.Program(n.t, "crust-proxy"), append([]string{"removable", "--config", n.ConfigFile()}, args...)...)
	said, err := cmd.CombinedOutput()
	check.Require(n.t, cmd.ProcessState != nil, "%v", err)
	code := cmd.ProcessState.ExitCode()
	check.That(n.t, code == want, "removable %q gave %d, want %d: %s", args, code, want, said)
	check.Says(n.t, fmt.Sprintf("removable %q", args), string(said), words...)
}

const withoutFront = "front: {enabled: false}"

// TestFrontIsNotRemovedUnderItsVolumes: the front, the daemon and the driver's place behind it are not given up under a
// pod, unless somebody insists; and the pod keeps running in any case.
func TestFrontIsNotRemovedUnderItsVolumes(t *testing.T) {
	for name, args := range map[string][]string{"block": nil, "native": {"--defer"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			notRemoved(newNode(t, deferAll, args...), name == "native")
		})
	}
}

func notRemoved(n *node, native bool) {
	t := n.t
	withFront := n.Extra
	check.Eventually(t, "kubelet is offered the driver", func() bool { return check.Err(os.Stat(n.registration())) == nil })
	n.wantRemovable(1, []string{"1 CSI driver(s) are behind the front: " + driverName})
	v := n.create("pv-1", "ext4", 16*mib)
	check.Must(t, n.stage(v))
	if native {
		n.wantRemovable(0, nil, driverName) // the driver staged it by itself, and defers nothing yet
	} else {
		n.wantRemovable(1, []string{v.ID, "staged at"}) // only the front can have it unstaged
	}
	check.Must(t, n.publish(v, "pod-1"))
	s := n.boot("sandbox-1", v, "pod-1")
	n.podWrites(s, "first")
	target := v.TargetOf("pod-1")

	n.wantRemovable(1, []string{target, "1 deferred volume", "drain the node", "--abandon-volumes"})
	n.wantRemovable(1, []string{target}, driverName)
	n.wantRemovable(0, nil, "other.example.com")
	n.wantRemovable(0, []string{"warning", target}, "--abandon-volumes")

	n.Extra = withoutFront + "\n" + deferAll
	n.ConfigFile()
	n.Signal(syscall.SIGHUP)
	n.waitFindings("the changed file is refused", target)
	check.Must(t, n.publish(v, "pod-1")) // and the front is there
	n.podWrites(s, "reload refused")

	n.Signal(syscall.SIGTERM)
	check.Equal(t, n.WaitEnd(time.Minute), 0, "it ended with")
	n.Launch()
	code := n.WaitEnd(time.Minute)
	check.That(t, code != 0 && strings.Contains(n.Log(), target) && strings.Contains(n.Log(), "abandonVolumes"), "started without the front: %d", code)
	n.podWrites(s, "start refused")
	n.startByAccepted(withFront)
	check.Must(t, os.Remove(n.Dir+"/marks-made")) // the front records that it created its marks
	n.waitFindings("the start with the file is refused", "front.enabled: false (the default) cannot be put in force: 1 deferred volume(s) live on this node: "+target)
	check.Must(t, n.publish(v, "pod-1"))
	n.Kill()
	n.Accepted = ""
	n.wantRemovable(1, []string{target}) // the daemon is down
	check.Must(t, os.Rename(n.Dir+"/run/state", n.Dir+"/lost"))
	for _, drivers := range [][]string{nil, {driverName}} {
		n.wantRemovable(1, []string{target + " has a guard and no record"}, drivers...)
	}
	check.Must(t, os.Rename(n.Dir+"/lost", n.Dir+"/run/state"))

	n.Extra = withFront
	n.Start()
	n.waitServed()
	check.Must(t, n.publish(v, "pod-1")) // as kubelet repeats it
	check.Succeeds(t, "stats", func() error { _, err := n.stats(v, "pod-1"); return err })
	n.podWrites(s, "put back")

	n.forceOff(v, s)
	n.Kill()
	n.Extra = withFront
	n.Start()
	n.waitServed()
	check.Must(t, n.publish(v, "pod-1"))
	check.Code(t, n.publish(v, "pod-2"), codes.FailedPrecondition, target)
	check.Succeeds(t, "stats", func() error { _, err := n.stats(v, "pod-1"); return err })
	n.podWrites(s, "taken up")
	n.end(s)
	check.Must(t, n.unpublish(v, "pod-1"))
	check.Must(t, n.unpublish(v, "pod-2"))
	check.Must(t, n.unstage(v))
	n.wantRemovable(0, nil, driverName)
	n.remove(v)
	n.wantClean()

	n.Kill() // which leaves what kubelet would call, as a package that is removed must not
	out, err := exec.Command(rig.Program(t, "crust-proxy"), "withdraw", "--config", n.ConfigFile()).CombinedOutput()
	_, there := os.Stat(n.registration())
	check.That(t, err == nil && string(out) == n.registration()+"\n" && errors.Is(there, os.ErrNotExist),
		"withdraw said %q, %v; %s: %v", out, err, n.registration(), there)
}

// startByAccepted starts the daemon with its file, after one with extra was accepted.
func (n *node) startByAccepted(extra string) {
	n.t.Helper()
	bad := n.Extra
	n.Extra, n.Accepted = extra, n.Dir+"/accepted.yaml"
	check.Must(n.t, os.WriteFile(n.Accepted, []byte(n.Config()), 0o600))
	n.Extra = bad
	n.Start()
	n.waitServed()
}

func (n *node) registration() string {
	return n.Kubelet + "/plugins_registry/" + driverName + ".crust-proxy-reg.sock"
}

// forceOff starts the daemon without its front over a living volume.
func (n *node) forceOff(v *volume, s *kata.Guest) {
	n.t.Helper()
	n.Kill()
	n.Extra = "front: {enabled: false, abandonVolumes: true}\n" + deferAll
	n.Start()
	check.That(n.t, strings.Contains(n.Log(), "not all volumes that came through it are known to be gone"), "the log does not warn")
	check.That(n.t, check.Err(os.Stat(n.registration())) != nil, "kubelet still has the registration, of a socket that nobody serves")
	n.podWrites(s, "forced off")
	n.wantGuarded(v, "pod-1")
	check.Eventually(n.t, "its sandbox is known without the front", func() bool {
		got, err := n.Admin().GetVolume(n.t.Context(), &adminv1.GetVolumeRequest{Volume: v.TargetOf("pod-1")})
		return err == nil && got.GetVolume().GetState() == adminv1.VolumeState_VOLUME_STATE_BOUND
	})
}

// podWrites has the pod write to its volume, and read what it wrote.
func (n *node) podWrites(s *kata.Guest, what string) {
	n.t.Helper()
	check.Must(n.t, os.WriteFile(s.Dir()+"/file", []byte(what), 0o600))
	check.Equal(n.t, string(check.Value(os.ReadFile(s.Dir()+"/file"))(n.t)), what, "the pod reads")
}
