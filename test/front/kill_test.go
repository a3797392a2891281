//go:build system

package front

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/kata"
)

// The places in the daemon at which it is killed.
var (
	stageSteps   = []string{"front-stage-recorded", "front-stage-driver", "front-stage-placed"}
	publishSteps = []string{
		"front-publish-made", "front-publish-driver", "stage-claimed", "stage-recorded", "stage-made-target", "stage-guarded",
		"kata-built", "stage-published", "front-publish-instructed",
	}
	unpublishSteps = []string{
		"unstage-begun", "unstage-retracted", "unstage-unguarded", "unstage-released", "front-unpublish-unstaged",
		"front-unpublish-private", "front-unpublish-driver",
	}
	unstageSteps = []string{"front-unstage-driver"}
)

// insist repeats a call as kubelet does, and brings the daemon back when it was killed.
func (n *node) insist(what string, call func() error) {
	n.t.Helper()
	check.Succeeds(n.t, what, func() error {
		err := call()
		if err != nil {
			n.revive()
		}
		return err
	})
}

// revive starts again whatever was killed, and waits until all is well.
func (n *node) revive() {
	n.t.Helper()
	check.Succeeds(n.t, "the driver answers through the front", func() error {
		if !n.driver.Process.Alive() {
			n.startDriver()
		}
		if n.Dead() { // which shows a little after the call that it died of
			n.Kill()
			n.Start()
		}
		return n.driver.Served()
	})
}

// life is one pod's whole use of a volume; data is written in the sandbox.
func (n *node) life(v *volume, pod string) {
	n.t.Helper()
	n.insist("stage", func() error { return n.stage(v) })
	n.insist("publish", func() error { return n.publish(v, pod) })
	s := n.boot("sandbox-"+pod, v, pod)
	check.Must(n.t, os.WriteFile(s.Dir()+"/"+pod, []byte(pod), 0o600))
	n.wantData(s)
	n.end(s)
	n.insist("unpublish", func() error { return n.unpublish(v, pod) })
	n.insist("unstage", func() error { return n.unstage(v) })
}

// wantData asserts that all that the pods wrote so far is there.
func (n *node) wantData(s *kata.Guest) {
	n.t.Helper()
	names := check.Value(os.ReadDir(s.Dir()))(n.t)
	for _, name := range names {
		if name.Name() == "lost+found" {
			continue
		}
		raw, err := os.ReadFile(s.Dir() + "/" + name.Name())
		check.That(n.t, err == nil && string(raw) == name.Name(), "%s holds %q, %v", name.Name(), raw, err)
	}
	want := n.pods + 1
	if got := len(names); got != want && got != want+1 { // lost+found
		n.t.Errorf("%d files of %d pods", got, want)
	}
	n.pods++
}

// some are every second step, of which each way has its own, and in a soak all.
func some(way string, steps []string) []string {
	if way == "native" {
		return rig.Sample(steps, 2)
	}
	return append(rig.Sample(steps[:1], 2), rig.Sample(steps[1:], 2)...)
}

func TestDaemonKilledAtEveryStep(t *testing.T) {
	for name, args := range map[string][]string{"block": nil, "native": {"--defer"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, deferAll, args...)
			v := n.create("pv-1", "ext4", 16*mib)
			steps, ofBlock := allSteps(name), some("block", allSteps("block"))
			if name == "block" {
				steps = ofBlock
			} else if !rig.Soak() { // what the other left out, so that no step is without a kill
				steps = slices.DeleteFunc(steps, func(step string) bool { return slices.Contains(ofBlock, step) })
			}
			for i, step := range steps {
				began := time.Now()
				n.arm(step)
				armed := time.Since(began)
				n.life(v, fmt.Sprintf("pod-%d", i))
				t.Logf("%s: armed in %v, lived for %v", step, armed, time.Since(began)-armed)
				check.Require(t, n.Starts() >= 2*(i+1)+1, "the daemon was not killed at %s", step)
				n.wantCleanSoFar()
			}
			n.remove(v)
		})
	}
}

// TestDriverKilledAtEveryStep kills the driver in the middle of what the front has asked of it.
func TestDriverKilledAtEveryStep(t *testing.T) {
	for name, args := range map[string][]string{"block": nil, "native": {"--defer"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, deferAll, args...)
			v := n.create("pv-1", "ext4", 16*mib)
			killed := 0
			for i, step := range some(name, driverSteps) {
				n.driver.Process.Kill()
				n.startDriver("CRUST_FAILPOINTS=" + step + "=kill")
				n.waitServed()
				armed := n.driver.Process.Starts()
				n.life(v, fmt.Sprintf("pod-%d", i))
				if n.driver.Process.Starts() > armed || !n.driver.Process.Alive() {
					killed++
				}
				n.wantCleanSoFar()
			}
			steps := len(some(name, driverSteps)) // each way leaves out a few of the other
			check.That(t, killed >= steps-2, "the driver was killed at %d of %d steps only", killed, steps)
			n.remove(v)
		})
	}
}

var driverSteps = []string{
	"driver-attached", "driver-stage-recorded", "driver-publish-recorded", "driver-published", "driver-target-cleared", "driver-detached",
}

func allSteps(way string) []string {
	var all []string
	if way == "native" {
		all = append(all, "front-publish-asked")
	}
	for _, steps := range [][]string{stageSteps, publishSteps, unpublishSteps, unstageSteps} {
		for _, step := range steps {
			if way == "native" && (step == "front-publish-made" || step == "front-unpublish-private") {
				continue // there are no private paths
			}
			all = append(all, step)
		}
	}
	return all
}

// TestPublishGivenUpAfterAKill is kubelet whose pod was deleted meanwhile: the publish is not repeated but undone.
func TestPublishGivenUpAfterAKill(t *testing.T) {
	t.Parallel()
	n := newNode(t, deferAll)
	v := n.create("pv-1", "ext4", 16*mib)
	for _, step := range append(append([]string{}, stageSteps...), publishSteps...) {
		n.arm(step)
		if err := n.stage(v); err == nil {
			err = n.publish(v, "pod-1")
			check.That(t, err != nil && maybe(err), "%s: the publish gave %v", step, err)
		}
		n.insist("unpublish", func() error { return n.unpublish(v, "pod-1") })
		n.insist("unstage", func() error { return n.unstage(v) })
		n.wantCleanSoFar()
	}
	n.remove(v)
}

// TestKilledWhileStagingAnew has a staged volume staged in the other way, and kills the daemon at each step between the
// two. To a device: a driver that defers by itself is downgraded. To the host: the verdict changes.
func TestKilledWhileStagingAnew(t *testing.T) {
	for name, way := range map[string]struct {
		before, after string
		args          []string // the driver's before
	}{
		"to a device": {deferNone, deferThenHost, []string{"--defer"}},
		"to the host": {deferThenHost, deferNone, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, way.before)
			downgraded := n.driver.Process.Args
			v := n.create("pv-1", "ext4", 16*mib)
			for i, step := range []string{"front-unplacing", "front-unplaced", "front-stage-recorded", "front-stage-driver", "front-stage-placed"} {
				n.Extra = "front: {enabled: true}\n" + way.before
				n.replaceDriver(slices.Concat(downgraded, way.args))
				n.restart()
				check.Must(t, n.stage(v))
				n.replaceDriver(downgraded)
				n.Extra = "front: {enabled: true}\n" + way.after
				starts := n.Starts()
				n.arm(step)
				n.insist("publish", func() error { return n.publish(v, "pod-1") })
				check.That(t, n.Starts() >= starts+2, "%d: the daemon was not killed at %s", i, step)
				if way.after == deferThenHost {
					n.wantGuarded(v, "pod-1")
				} else {
					n.wantMounted(v, "pod-1")
				}
				n.insist("unpublish", func() error { return n.unpublish(v, "pod-1") })
				n.insist("unstage", func() error { return n.unstage(v) })
				n.wantCleanSoFar()
			}
			n.remove(v)
		})
	}
}

// replaceDriver ends the driver and starts it with other arguments.
func (n *node) replaceDriver(args []string) {
	n.t.Helper()
	n.driver.Process.Kill()
	n.driver.Process.Args = args
	n.startDriver()
}

// restart starts the daemon with the configuration as it is now.
func (n *node) restart() {
	n.t.Helper()
	n.Kill()
	n.Start()
	n.waitServed()
}

// wantMounted asserts that the volume's filesystem is what the target shows, and not the node's disk.
func (n *node) wantMounted(v *volume, pod string) {
	n.t.Helper()
	mounts := rig.Mounts(v.TargetOf(pod))
	last := len(mounts) - 1
	check.That(n.t, last >= 0 && mounts[last].FSType == "ext4" && strings.HasPrefix(mounts[last].Source, "/dev/loop"),
		"the target does not show the volume: %+v", mounts)
}

// wantCleanSoFar asserts that only the driver's own data of a volume is left.
func (n *node) wantCleanSoFar() {
	n.t.Helper()
	if n.t.Failed() {
		n.t.FailNow() // the first step that leaves something tells most
	}
	n.wantClean()
}

// TestReboot loses everything below /run, every mount and every process; what is on disk stays. kubelet
// cleans up for a pod that has gone meanwhile, and publishes for one that it starts again.
func TestReboot(t *testing.T) {
	for name, row := range map[string]struct {
		gone bool
		args []string // the driver's
	}{
		"a pod that has gone":            {gone: true},
		"a pod that starts again":        {},
		"a native pod that has gone":     {true, []string{"--defer"}},
		"a native pod that starts again": {false, []string{"--defer"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, deferAll, row.args...)
			v := n.create("pv-1", "ext4", 16*mib)
			n.up(v, "pod-1")
			n.reboot()
			if row.gone {
				check.Must(t, n.unpublish(v, "pod-1"))
				check.Must(t, n.unstage(v))
				n.wantClean()
			}
			n.life(v, "pod-1")
			n.remove(v)
		})
	}
}

func (n *node) reboot() {
	n.t.Helper()
	n.Kill()
	n.driver.Process.Kill()
	for _, point := range rig.MountPoints(n.Dir) {
		if point != n.Dir {
			check.Must(n.t, unix.Unmount(point, unix.MNT_DETACH))
		}
	}
	check.Must(n.t, os.RemoveAll(n.Dir+"/run"))
	check.Must(n.t, os.RemoveAll(n.Kata))
	check.Must(n.t, os.MkdirAll(n.Kata, 0o755))
	for _, loop := range n.loops() {
		check.Must(n.t, loopdev.Detach(loop))
	}
	rig.OfAnotherBoot(n.t, n.driver.Data)
	n.startDriver()
	n.Start()
	n.waitServed()
}
