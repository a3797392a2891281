package conformance

import (
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
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
	begun, err := beginAlone(opts.Dir)
	if err != nil {
		return nil, err
	}
	defer func() { _ = begun.Close() }()
	if err := clearKilled(opts.Dir); err != nil {
		return nil, err
	}
	n := &node{opts: opts}
	defer func() {
		if err != nil {
			err = errors.Join(err, n.close())
		}
	}()
	if n.dir, err = os.MkdirTemp(opts.Dir, dirPrefix); err != nil {
		return nil, err
	}
	n.base.add(func(context.Context) error { return n.removeDir() })
	n.run = strings.TrimPrefix(filepath.Base(n.dir), dirPrefix)
	if err = n.claim(); err != nil {
		return nil, err
	}
	if err = begun.Close(); err != nil {
		return nil, err
	}
	if err := n.layOut(); err != nil {
		return nil, err
	}
	var stdin *os.File
	if stdin, n.lease, err = os.Pipe(); err != nil {
		return nil, err
	}
	n.base.add(func(context.Context) error { return errors.Join(n.lease.Close(), stdin.Close()) })
	n.handler = newHandler(opts, n.dir, n.path("state"), stdin)
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
	return isStatic(opts.Self)
}

// isStatic returns an error for a program that needs libraries: the image has none.
func isStatic(path string) error {
	program, err := elf.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = program.Close() }()
	for _, part := range program.Progs {
		if part.Type == elf.PT_INTERP {
			return errors.New("this program is linked dynamically and cannot run in the containers: build it with CGO_ENABLED=0")
		}
	}
	return nil
}

// layOut makes the directories. kubelet's is on a shared mount, as on a node: a mount in
// it without care is visible everywhere.
func (n *node) layOut() error {
	for _, dir := range []string{"kubelet", "state", "bundles", "rootfs/data", "rootfs/other", "rootfs/mnt", "rootfs/proc", "rootfs/dev", "rootfs/sys", "rootfs/tmp"} {
		if err := os.MkdirAll(n.path(dir), 0o755); err != nil { //nolint:gosec // an image's directories
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
	if err := copyFile(n.opts.Self, n.path("rootfs/probe")); err != nil {
		return err
	}
	n.removeRootLater()
	return nil
}

// removeRootLater lets the directory of volumes be removed at the end, if it did not exist
// before and nobody else uses it.
func (n *node) removeRootLater() {
	if _, err := os.Lstat(n.opts.Root); !errors.Is(err, fs.ErrNotExist) {
		return
	}
	n.base.add(func(context.Context) error {
		if err := os.Remove(n.opts.Root); !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTEMPTY) {
			return err
		}
		return nil
	})
}

func (n *node) path(elem ...string) string {
	return filepath.Join(append([]string{n.dir}, elem...)...)
}

// id makes a new id for a container.
func (n *node) id(kind string) string {
	n.count++
	return fmt.Sprintf("conformance-%s-%s-%d", n.run, kind, n.count)
}

// podUID makes the UID of a pod.
func (n *node) podUID() string {
	n.count++
	return fmt.Sprintf("%s-0000-4000-8000-%012d", n.run, n.count)
}

// close removes everything.
func (n *node) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), cleanupTimeout)
	defer cancel()
	err := n.scratch.run(ctx)
	if n.mounts != nil {
		err = errors.Join(err, n.mounts.Close())
	}
	return errors.Join(err, n.base.run(ctx))
}

func copyFile(from, to string) error {
	program, err := os.ReadFile(from) //nolint:gosec // this program
	if err != nil {
		return err
	}
	return os.WriteFile(to, program, 0o755) //nolint:gosec // it is run by containers
}

// removeDir removes our directory with the mounts that are left in it, and the volumes
// whose guards are among them. A killed runtime may have left one in its state directory:
// runc binds its program there for a moment.
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

// poll is the interval of retries.
const poll = 20 * time.Millisecond

// eventually retries until it succeeds, ctx ends, or the time is over.
func eventually(ctx context.Context, most time.Duration, try func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	for {
		err := try(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(poll):
		}
	}
}
