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
	f := &fixture{}
	var err error
	f.disk, err = newDisk(t.ctx, n)
	t.must(err)
	f.vol, err = newVolume(n, f.disk, uid, "pv")
	t.must(err)
	if f.pod, err = newPod(t.ctx, n, uid); err != nil {
		t.must(fmt.Errorf("%s cannot run a plain sandbox: %w", n.opts.Runtime, err))
	}
	return f
}

// container runs a container that has the whole volume.
func (f *fixture) container(t *trial, name string) *container {
	return t.container(f.pod, name, all(f.vol))
}

// refuses fails if the pod gets a container that has the whole volume.
func (f *fixture) refuses(t *trial) { t.must(f.pod.refuses(t.ctx, all(f.vol))) }

// restartPod ends the pod and runs a new sandbox for it, as kubelet does without any CSI
// call, after the broker has removed what the dead one left.
func (f *fixture) restartPod(t *trial, containers ...*container) {
	t.must(f.pod.end(t.ctx, containers...))
	t.must(f.disk.waitFree(t.ctx))
	t.must(f.vol.unbind())
	var err error
	f.pod, err = newPod(t.ctx, f.pod.n, f.vol.owner)
	t.must(err)
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
	place := t.bindSub(f.vol, sub)
	if err := f.pod.refuses(t.ctx, bind{source: place, at: "/data"}); err != nil {
		t.must(fmt.Errorf("the sub-directory %q: %w", sub, err))
	}
}
