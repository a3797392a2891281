//go:build system

package front

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/kata"
)

// TestNothingIsEverDestroyed makes random calls for a few volumes and pods, in any order that kubelet could and some
// that it would not, kills everybody at random steps, and looks after each step whether a filesystem lost a file, two
// sandboxes could write to one device, or a foreign mount lost its content. CRUST_SEED repeats a run.
func TestNothingIsEverDestroyed(t *testing.T) {
	seed := rig.Seed(t)
	for name, args := range map[string][]string{"block": nil, "native": {"--defer"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			newChaos(newNode(t, deferAll, args...), seed).run(rig.RaceTime())
		})
	}
}

// chaos is the model: what the volumes must hold.
type chaos struct {
	*node
	random  *rand.Rand
	volumes []*chaosVolume
	steps   []string
}

type chaosVolume struct {
	*volume
	files     []string               // written by sandboxes, in this order
	sandboxes map[string]*kata.Guest // by pod
}

var chaosPods = []string{"pod-a", "pod-b"}

func newChaos(n *node, seed uint64) *chaos {
	c := &chaos{node: n, random: rand.New(rand.NewPCG(seed, seed))}
	for i := range 3 {
		v := n.create(fmt.Sprintf("pv-%d", i), "ext4", 16*mib)
		c.volumes = append(c.volumes, &chaosVolume{volume: v, sandboxes: make(map[string]*kata.Guest)})
	}
	for _, steps := range [][]string{stageSteps, publishSteps, unpublishSteps, unstageSteps} {
		c.steps = append(c.steps, steps...)
	}
	return c
}

func (c *chaos) run(long time.Duration) {
	for steps, began := 0, time.Now(); steps < 100 || c.Starts() < 3 || time.Since(began) < long || c.written() == 0 && steps < 2000; steps++ {
		v, pod := c.volumes[c.random.IntN(len(c.volumes))], chaosPods[c.random.IntN(len(chaosPods))]
		c.step(v, pod)
		c.revive()
		if c.t.Failed() {
			c.t.FailNow()
		}
	}
	written := c.written()
	for _, v := range c.volumes {
		c.finish(v)
	}
	c.t.Logf("%d sandboxes wrote; the daemon was started %d times", written, c.Starts())
	check.That(c.t, written != 0, "nothing was written: the steps prove nothing")
}

// written counts what sandboxes wrote.
func (c *chaos) written() (n int) {
	for _, v := range c.volumes {
		n += len(v.files)
	}
	return n
}

// step does one thing. What calls answer does not matter here: what they leave does.
func (c *chaos) step(v *chaosVolume, pod string) {
	switch c.random.IntN(24) {
	case 0, 1, 2:
		_ = c.stage(v.volume)
	case 3, 4, 5, 6, 7, 8:
		_ = c.publish(v.volume, pod)
	case 9, 10:
		_ = c.unpublish(v.volume, pod)
	case 11:
		_ = c.unstage(v.volume)
	case 12, 13, 14, 15:
		c.use(v, pod)
	case 16, 17, 18, 19, 20:
		if target := v.TargetOf(pod); c.foreign[target] {
			c.endForeign(target)
		}
		if s := v.sandboxes[pod]; s != nil {
			c.end(s)
			delete(v.sandboxes, pod)
		}
	case 21:
		c.revive()
		c.arm(c.steps[c.random.IntN(len(c.steps))])
	case 22:
		c.driver.Process.Kill() // revive starts it again
	case 23:
		c.foreignMount(v, pod)
	}
}

// use starts a sandbox where the runtime would find an instruction, looks at every file, and writes one more.
func (c *chaos) use(v *chaosVolume, pod string) {
	if v.sandboxes[pod] != nil || c.foreign[v.TargetOf(pod)] {
		return
	}
	if _, err := os.Stat(filepath.Join(c.kataDir(v.volume, pod), "mountInfo.json")); err != nil {
		return
	}
	check.Require(c.t, len(v.sandboxes) == 0,
		"%s: an instruction for %s stands while the sandbox of %v writes", v.Name, pod, slices.Collect(maps.Keys(v.sandboxes)))
	c.wantNotMountable(v, pod)
	s := c.boot(fmt.Sprintf("sandbox-%d", c.random.Uint32()), v.volume, pod)
	v.sandboxes[pod] = s
	for _, name := range v.files {
		raw, err := os.ReadFile(filepath.Join(s.Dir(), name))
		check.Require(c.t, err == nil && string(raw) == name, "%s: the file %s holds %q, %v", v.Name, name, raw, err)
	}
	name := fmt.Sprintf("file-%d", len(v.files))
	check.Must(c.t, os.WriteFile(filepath.Join(s.Dir(), name), []byte(name), 0o600))
	unix.Sync()
	v.files = append(v.files, name)
}

// wantNotMountable is somebody on the host who tries to mount a claimed device.
func (c *chaos) wantNotMountable(v *chaosVolume, pod string) {
	c.t.Helper()
	device, fs := c.mountInfo(v.volume, pod)
	err := unix.Mount(device, c.t.TempDir(), fs, 0, "")
	check.Require(c.t, err == unix.EBUSY, "%s: the host could mount the claimed device %s: %v", v.Name, device, err)
}

// foreignMount has somebody mount something of his own on a target, or take it
// away again. Its content must be there whatever was called meanwhile.
func (c *chaos) foreignMount(v *chaosVolume, pod string) {
	target := v.TargetOf(pod)
	if c.foreign[target] {
		c.endForeign(target)
		return
	}
	if os.MkdirAll(target, 0o750) != nil || unix.Mount("foreign", target, "tmpfs", 0, "size=1m") != nil {
		return
	}
	check.Must(c.t, os.MkdirAll(target+"/deep/er", 0o755))
	check.Must(c.t, os.WriteFile(target+"/deep/er/data", []byte("foreign"), 0o600))
	c.foreign[target] = true
}

func (c *chaos) endForeign(target string) {
	c.t.Helper()
	raw, err := os.ReadFile(target + "/deep/er/data")
	check.Require(c.t, err == nil && string(raw) == "foreign", "the foreign mount on %s lost its content: %q, %v", target, raw, err)
	check.Must(c.t, unix.Unmount(target, unix.MNT_DETACH))
	delete(c.foreign, target)
}

// finish ends the use of a volume as kubelet would, and looks at it a last time.
func (c *chaos) finish(v *chaosVolume) {
	for pod, s := range v.sandboxes {
		c.end(s)
		delete(v.sandboxes, pod)
	}
	for _, pod := range chaosPods {
		if target := v.TargetOf(pod); c.foreign[target] {
			c.endForeign(target)
		}
		c.insist("unpublish "+v.Name, func() error { return c.unpublish(v.volume, pod) })
	}
	c.insist("unstage", func() error { return c.unstage(v.volume) })
	c.insist("stage", func() error { return c.stage(v.volume) })
	c.insist("publish", func() error { return c.publish(v.volume, "pod-last") })
	c.use(v, "pod-last")
	c.end(v.sandboxes["pod-last"])
	c.insist("unpublish", func() error { return c.unpublish(v.volume, "pod-last") })
	c.insist("unstage", func() error { return c.unstage(v.volume) })
	c.insist("delete", func() error { c.remove(v.volume); return nil })
}
