package conformance

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// fixture is what most test cases begin with: a volume, and a sandbox of its pod.
type fixture struct {
	disk *disk
	vol  *testVolume
	pod  *pod
}

// newFixture makes a volume for a pod, and runs its sandbox. Cleanup goes in the opposite
// order: further disks of the pod are made before the fixture.
func newFixture(t *trial, n *node, uid string) *fixture {
	d := newDisk(t, n)
	f := &fixture{disk: d, vol: newVolume(t, n, d, uid, "pv")}
	err := try(t.ctx, func(t *trial) { f.pod = newPod(t, n, uid) })
	if err != nil {
		t.must(fmt.Errorf("%s cannot run a plain sandbox: %w", n.opts.Runtime, err))
	}
	return f
}

// container runs a container that has the whole volume.
func (f *fixture) container(t *trial, name string) *container {
	return t.container(f.pod, name, all(f.vol))
}

// refuses fails if the pod gets a container that has the whole volume.
func (f *fixture) refuses(t *trial) { f.pod.refuses(t, all(f.vol)) }

// restartPod ends the pod and runs a new sandbox for it, as kubelet does without any CSI
// call, after the broker has removed what the dead one left.
func (f *fixture) restartPod(t *trial, containers ...*container) {
	f.pod.end(t, containers...)
	t.must(f.disk.waitFree(t.ctx))
	t.must(f.vol.unbind())
	f.pod = newPod(t, f.pod.n, f.vol.owner)
}

// seesFilesystem fails if the container sees another filesystem, or cannot use it.
func seesFilesystem(t *trial, c *container) {
	magic := map[string]int64{"ext4": unix.EXT4_SUPER_MAGIC, "xfs": unix.XFS_SUPER_MAGIC, "btrfs": unix.BTRFS_SUPER_MAGIC}
	use := asked[seenUsage](t, c, "usage", "/data")
	if use.Type == unix.TMPFS_MAGIC {
		t.must(errors.New("the container sees the guard"))
	}
	if use.Type != magic[c.n.opts.FSType] {
		t.must(fmt.Errorf("the container sees another filesystem (magic %#x) than the volume's %s", use.Type, c.n.opts.FSType))
	}
	t.exec(c, "write", "/data/greeting", "hello")
	t.wantText(c, "/data/greeting", "what was written", "hello")
}

// isLarger fails if the filesystem still has its old size.
func isLarger(t *trial, c *container, than int64) {
	use := asked[seenUsage](t, c, "usage", "/data")
	if total := int64(use.Blocks) * use.Unit; total <= than { //nolint:gosec // a small disk
		t.must(fmt.Errorf("the filesystem has %d bytes, as before; its device is larger", total))
	}
}

func (f *fixture) refusesSub(t *trial, sub string) {
	place := f.vol.bindSub(t, sub)
	err := try(t.ctx, func(t *trial) { f.pod.refuses(t, bind{source: place, at: "/data"}) })
	if err != nil {
		t.must(fmt.Errorf("the sub-directory %q: %w", sub, err))
	}
}
