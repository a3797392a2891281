package conformance

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/reference/mountwatch"
)

// node is a simulated node: a directory for kubelet, the runtime and the image, and a
// watch over the mounts of the host.
type node struct {
	opts    Options
	dir     string
	run     string // makes the ids of this run unique
	handler *handler
	mounts  *mountwatch.Watch
	lease   *os.File // the containers live until it is closed
	count   int
	scratch cleanup // removes what a test case made
	base    cleanup // removes the node
}

func newNode(opts Options) (_ *node, err error) {
	if err := checkHost(opts); err != nil {
		return nil, err
	}
	n := &node{opts: opts}
	defer func() {
		if err != nil {
			err = errors.Join(err, n.close())
		}
	}()
	const prefix = "crust-conformance-"
	if n.dir, err = os.MkdirTemp(opts.Dir, prefix); err != nil {
		return nil, err
	}
	n.base.add(func(context.Context) error { return n.removeDir() })
	n.run = strings.TrimPrefix(filepath.Base(n.dir), prefix)
	if err := n.layOut(); err != nil {
		return nil, err
	}
	var stdin *os.File
	if stdin, n.lease, err = os.Pipe(); err != nil {
		return nil, err
	}
	n.base.add(func(context.Context) error { return errors.Join(n.lease.Close(), stdin.Close()) })
	n.handler = &handler{program: opts.Runtime, state: n.path("state"), dir: n.dir, stdin: stdin}
	n.mounts, err = mountwatch.New()
	return n, err
}

// checkHost returns what the tests need and the machine lacks, as an error.
func checkHost(opts Options) error {
	if os.Geteuid() != 0 {
		return errors.New("this makes devices and mounts: run it as root")
	}
	if _, err := os.Stat(opts.Runtime); err != nil {
		return fmt.Errorf("the runtime: %w", err)
	}
	if _, err := exec.LookPath("mkfs." + opts.FSType); err != nil {
		return fmt.Errorf("the filesystem %q cannot be made here: %w", opts.FSType, err)
	}
	return nil
}

// layOut makes the directories. kubelet's is on a shared mount, as on a node: a mount in
// it without care is visible everywhere.
func (n *node) layOut() error {
	for _, dir := range []string{"kubelet", "state", "bundles", "rootfs/proc", "rootfs/dev", "rootfs/sys", "rootfs/tmp"} {
		if err := os.MkdirAll(n.path(dir), 0o755); err != nil { //nolint:gosec // an image's directories: the runtime creates mount points
			return err
		}
	}
	kubelet := n.path("kubelet")
	if err := unix.Mount("crust-conformance", kubelet, "tmpfs", 0, "mode=0755"); err != nil {
		return fmt.Errorf("mount a tmpfs at %s: %w", kubelet, err)
	}
	n.base.add(func(context.Context) error { return unmountAll(kubelet) })
	if err := unix.Mount("", kubelet, "", unix.MS_SHARED, ""); err != nil {
		return fmt.Errorf("share the mount %s: %w", kubelet, err)
	}
	program, err := os.ReadFile("/proc/self/exe") // it runs Probe in containers without libraries: if it is static, as make builds it
	if err == nil {
		err = os.WriteFile(n.path("rootfs/probe"), program, 0o755) //nolint:gosec // it is run by containers
	}
	return err
}

func (n *node) path(elem ...string) string {
	return filepath.Join(append([]string{n.dir}, elem...)...)
}

func (n *node) id(kind string) string {
	n.count++
	return fmt.Sprintf("conformance-%s-%s-%d", n.run, kind, n.count)
}

func (n *node) podUID() string {
	n.count++
	return fmt.Sprintf("%s-0000-4000-8000-%012d", n.run, n.count)
}

func (n *node) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), cleanupTimeout)
	defer cancel()
	err := n.scratch.run(ctx)
	if n.mounts != nil {
		err = errors.Join(err, n.mounts.Close())
	}
	return errors.Join(err, n.base.run(ctx))
}

// removeDir removes our directory with the mounts that are left in it, and the volumes whose guards are among them. A
// killed runtime may have left one in its state directory: runc binds its program there for a moment.
func (n *node) removeDir() error {
	left, err := mountinfo.GetMounts(mountinfo.PrefixFilter(n.dir))
	if err != nil {
		return err
	}
	for _, m := range slices.Backward(left) { // the last first
		if err := unmountAll(m.Mountpoint); err != nil {
			return err
		}
		if key, guard := strings.CutPrefix(m.Source, abi.GuardPrefix); guard && abi.IsDirName(key) {
			if err := os.RemoveAll(filepath.Join(n.opts.Root, key)); err != nil {
				return err
			}
		}
	}
	return os.RemoveAll(n.dir)
}

// unmountAll unmounts all mounts that are stacked at a path.
func unmountAll(place string) error {
	for range 64 {
		err := unix.Unmount(place, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("unmount %s: %w", place, err)
		}
	}
	return fmt.Errorf("%s cannot be unmounted: mounts keep coming back", place)
}

const poll = 20 * time.Millisecond

// eventually retries until it succeeds, ctx ends, or the time is over.
func eventually(ctx context.Context, most time.Duration, try func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	for {
		err := try(ctx)
		if err == nil || !sys.Sleep(ctx, poll) {
			return err
		}
	}
}

// cleanup is a stack of steps that remove what was made; the last step runs first.
type cleanup struct {
	mu    sync.Mutex // containers are created at once
	steps []func(context.Context) error
}

func (c *cleanup) add(step func(context.Context) error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.steps = append(c.steps, step)
}

// run runs all steps, also after an error. It may be called again.
func (c *cleanup) run(ctx context.Context) error {
	var errs []error
	for len(c.steps) > 0 {
		last := len(c.steps) - 1
		step := c.steps[last]
		c.steps = c.steps[:last]
		errs = append(errs, step(ctx))
	}
	return errors.Join(errs...)
}

const mib = 1 << 20

// The sizes of the new filesystem, of the device, and of the grown device. mkfs.xfs refuses less than 300 MiB.
const (
	madeSize  = 320 * mib
	diskSize  = 448 * mib
	grownSize = 576 * mib
)

type disk struct {
	image, path  string
	major, minor uint32
}

// newDisk makes a disk whose filesystem is smaller than the device.
func newDisk(t *trial, n *node) *disk {
	n.count++
	d := &disk{image: n.path("disk-" + strconv.Itoa(n.count))}
	t.must(os.WriteFile(d.image, nil, 0o600))
	n.scratch.add(func(context.Context) error { return os.Remove(d.image) })
	t.must(os.Truncate(d.image, diskSize))
	// It is detached when this program ends, even by a kill.
	hold, err := loopdev.AttachHeld(d.image, loopdev.Options{})
	t.must(err)
	d.path = hold.Name()
	n.scratch.add(func(ctx context.Context) error { return d.release(ctx, n.mounts, hold) })
	var st unix.Stat_t
	t.must(unix.Fstat(int(hold.Fd()), &st))
	d.major, d.minor = unix.Major(st.Rdev), unix.Minor(st.Rdev)
	n.mounts.Add(d.names()...)
	mkfs := exec.CommandContext(t.ctx, "mkfs."+n.opts.FSType, mkfsArguments(d.path, madeSize)[n.opts.FSType]...) //nolint:gosec // one of three
	out, err := mkfs.CombinedOutput()
	t.that(err == nil, "%s: %w: %s", mkfs, err, bytes.TrimSpace(out))
	return d
}

func (d *disk) names() []string { return []string{d.path, fmt.Sprintf("%d:%d", d.major, d.minor)} }

// mkfsArguments are those of each filesystem's mkfs, for one of a size on a device.
func mkfsArguments(device string, size int) map[string][]string {
	return map[string][]string{
		"ext4":  {"-q", "-F", device, strconv.Itoa(size/1024) + "k"},
		"xfs":   {"-q", "-f", "-d", "size=" + strconv.Itoa(size), device},
		"btrfs": {"-q", "-f", "-b", strconv.Itoa(size), device},
	}
}

// release closes the device and waits until it is detached.
func (d *disk) release(ctx context.Context, mounts *mountwatch.Watch, hold *os.File) error {
	err := errors.Join(d.setReadOnly(false), hold.Close())
	if err != nil {
		return err
	}
	err = eventually(ctx, endsWithin, func(context.Context) error {
		left, err := loopdev.Over(d.image)
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("the loop device %s is still in use: a sandbox or the handler has it", d.path)
		}
		return err
	})
	mounts.Remove(d.names()...)
	return err
}

// grow makes the device larger, as a CSI driver does.
func (d *disk) grow() error {
	if err := os.Truncate(d.image, grownSize); err != nil {
		return err
	}
	return loopdev.Grow(d.path)
}

// setReadOnly sets the device's read-only flag, as the broker does for a read-only
// volume. The kernel keeps the flag for the next user of the loop device.
func (d *disk) setReadOnly(is bool) error {
	fd, err := os.Open(d.path)
	if err != nil {
		return err
	}
	defer func() { _ = fd.Close() }()
	value := 0
	if is {
		value = 1
	}
	return unix.IoctlSetPointerInt(int(fd.Fd()), unix.BLKROSET, value)
}

// free fails while the device is mounted or claimed in any mount namespace.
func (d *disk) free() error {
	fd, err := unix.Open(d.path, unix.O_RDONLY|unix.O_EXCL|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("the device %s is still mounted somewhere", d.path)
	}
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

func (d *disk) waitFree(ctx context.Context) error {
	return eventually(ctx, endsWithin, func(context.Context) error { return d.free() })
}
