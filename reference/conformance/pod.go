package conformance

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// pod is a sandbox, and then its containers.
type pod struct {
	n       *node
	uid     string
	sandbox *container
}

// bind is a mount of a container.
type bind struct {
	source, at string
	mode       string // "" is rw
	owners     []specs.LinuxIDMapping
}

// all mounts the whole volume at /data.
func all(v *testVolume) bind { return bind{source: v.target, at: "/data"} }

func newPod(t *trial, n *node, uid string) *pod {
	p := &pod{n: n, uid: uid, sandbox: newContainer(n, "sandbox")}
	err := p.sandbox.run(t.ctx, p.sandboxSpec())
	t.that(err == nil, "the sandbox: %w", err)
	return p
}

func (p *pod) refuses(t *trial, binds ...bind) {
	newContainer(p.n, "refused").isRefused(t, p.containerSpec("refused", binds))
}

func (c *container) isRefused(t *trial, spec *specs.Spec) {
	ended, err := c.create(t.ctx, spec)
	t.must(err)
	t.that(ended.code != 0, "the runtime created the container; it should have refused it")
	t.that(ended.stderr != "", "the runtime refused the container (status %d) and does not say why", ended.code)
}

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
	t.that(err == nil, "%s cannot run a plain sandbox: %w", n.opts.Runtime, err)
	return f
}

func (f *fixture) container(t *trial, name string) *container {
	return t.container(f.pod, name, all(f.vol))
}

// refuses fails if the pod gets a container that has the whole volume.
func (f *fixture) refuses(t *trial) { f.pod.refuses(t, all(f.vol)) }

// restartPod ends the pod and runs a new sandbox for it, as kubelet does without any CSI
// call, after the broker has removed what the dead one left.
func (f *fixture) restartPod(t *trial, containers ...*container) {
	for _, c := range append(containers, f.pod.sandbox) {
		t.must(c.kill(t.ctx, unix.SIGKILL))
		t.must(c.remove(t.ctx))
	}
	t.must(f.disk.waitFree(t.ctx))
	for name := range f.vol.handlerFiles(t) {
		t.must(os.Remove(filepath.Join(f.vol.dir, name)))
	}
	f.pod = newPod(t, f.pod.n, f.vol.owner)
}

// seesFilesystem fails if the container sees another filesystem, or cannot use it.
func seesFilesystem(t *trial, c *container) {
	magic := map[string]int64{"ext4": unix.EXT4_SUPER_MAGIC, "xfs": unix.XFS_SUPER_MAGIC, "btrfs": unix.BTRFS_SUPER_MAGIC}
	use := asked[seenUsage](t, c, "usage", "/data")
	t.that(use.Type != unix.TMPFS_MAGIC, "the container sees the guard")
	t.that(use.Type == magic[c.n.opts.FSType], "the container sees another filesystem (magic %#x) than the volume's %s", use.Type, c.n.opts.FSType)
	t.exec(c, "write", "/data/greeting", "hello")
	t.wantText(c, "/data/greeting", "what was written", "hello")
}

// isLarger fails if the filesystem still has its old size.
func isLarger(t *trial, c *container, than int64) {
	use := asked[seenUsage](t, c, "usage", "/data")
	total := int64(use.Blocks) * use.Unit //nolint:gosec // a small disk
	t.that(total > than, "the filesystem has %d bytes, as before; its device is larger", total)
}

func (f *fixture) refusesSub(t *trial, sub string) {
	place := f.vol.bindSub(t, sub)
	err := try(t.ctx, func(t *trial) { f.pod.refuses(t, bind{source: place, at: "/data"}) })
	t.that(err == nil, "the sub-directory %q: %w", sub, err)
}

// trial tests one requirement, or sets up what several need.
type trial struct {
	ctx context.Context
	err error
}

// try calls f, which ends when it returns or when must fails, and returns the error of must.
func try(ctx context.Context, f func(*trial)) error {
	t := &trial{ctx: ctx}
	ended := make(chan struct{})
	go func() { defer close(ended); f(t) }()
	<-ended
	return t.err
}

// must ends the trial at an error. It is for the goroutine of the trial.
func (t *trial) must(err error) {
	if err != nil {
		t.err = err
		runtime.Goexit()
	}
}

// that ends the trial with an error, unless what it should find holds.
func (t *trial) that(holds bool, format string, args ...any) {
	if !holds {
		t.must(fmt.Errorf(format, args...))
	}
}

func (t *trial) container(p *pod, name string, binds ...bind) *container {
	c := newContainer(p.n, name)
	err := c.run(t.ctx, p.containerSpec(name, binds))
	t.that(err == nil, "the container %q: %w", name, err)
	return c
}

func (t *trial) exec(c *container, words ...string) string {
	out, err := c.exec(t.ctx, words...)
	t.must(err)
	return out
}

// wantText fails unless a file in the container has a content; what names it in the error.
func (t *trial) wantText(c *container, path, what, content string) {
	t.must(want(what, t.exec(c, "read", path), content))
}

func asked[T any](t *trial, c *container, words ...string) T {
	answer, err := ask[T](t.ctx, c, words...)
	t.must(err)
	return answer
}
