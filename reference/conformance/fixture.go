package conformance

import (
	"context"
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
func newFixture(ctx context.Context, n *node, pod string) (*fixture, error) {
	disk, err := newDisk(ctx, n)
	if err != nil {
		return nil, err
	}
	v, err := newVolume(n, disk, pod, "pv")
	if err != nil {
		return nil, err
	}
	p, err := newPod(ctx, n, v.owner)
	if err != nil {
		return nil, fmt.Errorf("%s cannot run a plain sandbox: %w", n.opts.Runtime, err)
	}
	return &fixture{disk: disk, vol: v, pod: p}, nil
}

// container runs a container that has the whole volume.
func (f *fixture) container(ctx context.Context, name string) (*container, error) {
	return f.pod.container(ctx, name, all(f.vol))
}

// restartPod ends the pod and runs a new sandbox for it, as kubelet does without any CSI
// call, after the broker has removed what the dead one left.
func (f *fixture) restartPod(ctx context.Context, containers ...*container) error {
	if err := f.pod.end(ctx, containers...); err != nil {
		return err
	}
	if err := f.disk.waitFree(ctx); err != nil {
		return err
	}
	if err := f.vol.unbind(); err != nil {
		return err
	}
	next, err := newPod(ctx, f.pod.n, f.vol.owner)
	if err != nil {
		return err
	}
	f.pod = next
	return nil
}

// seesFilesystem fails if the container sees another filesystem, or cannot use it.
func seesFilesystem(ctx context.Context, c *container) error {
	magic := map[string]int64{"ext4": unix.EXT4_SUPER_MAGIC, "xfs": unix.XFS_SUPER_MAGIC, "btrfs": unix.BTRFS_SUPER_MAGIC}
	use, err := ask[seenUsage](ctx, c, "usage", "/data")
	if err != nil {
		return err
	}
	if use.Type == unix.TMPFS_MAGIC {
		return errors.New("the container sees the guard")
	}
	if use.Type != magic[c.n.opts.FSType] {
		return fmt.Errorf("the container sees another filesystem (magic %#x) than the volume's %s", use.Type, c.n.opts.FSType)
	}
	if _, err := c.exec(ctx, "write", "/data/greeting", "hello"); err != nil {
		return err
	}
	return c.wantText(ctx, "/data/greeting", "what was written", "hello")
}

// isLarger fails if the filesystem still has its old size.
func (f *fixture) isLarger(ctx context.Context, c *container, than int64) error {
	use, err := ask[seenUsage](ctx, c, "usage", "/data")
	if err != nil {
		return err
	}
	if total := int64(use.Blocks) * use.Unit; total <= than { //nolint:gosec // a small disk
		return fmt.Errorf("the filesystem has %d bytes, as before; its device is larger", total)
	}
	return nil
}

func (f *fixture) refusesSub(ctx context.Context, sub string) error {
	place, err := f.vol.bindSub(sub)
	if err != nil {
		return err
	}
	if err := f.pod.refuses(ctx, bind{source: place, at: "/data"}); err != nil {
		return fmt.Errorf("the sub-directory %q: %w", sub, err)
	}
	return nil
}
