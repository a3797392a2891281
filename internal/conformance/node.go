package conformance

import (
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// node is the node that is played: a directory with kubelet's, the runtime's and
// the image's places in it, and a watch over the mounts of the host.
type node struct {
	undoStack
	opts  Options
	dir   string
	run   string // tells the ids of this run from those of others
	host  *hostWatch
	lease *os.File // while it is open the containers live
	stdin *os.File // what they get of it
	count int
	base  undoStack
}

func newNode(opts Options) (_ *node, err error) {
	if err := fit(opts); err != nil {
		return nil, err
	}
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
	n.base.later(func(context.Context) error { return os.RemoveAll(n.dir) })
	n.run = strings.TrimPrefix(filepath.Base(n.dir), dirPrefix)
	if err = n.claim(); err != nil {
		return nil, err
	}
	if err := n.layOut(); err != nil {
		return nil, err
	}
	if n.stdin, n.lease, err = os.Pipe(); err != nil {
		return nil, err
	}
	n.base.later(func(context.Context) error { return errors.Join(n.lease.Close(), n.stdin.Close()) })
	n.host, err = watchHost()
	return n, err
}

// fit sees that the node has what is needed.
func fit(opts Options) error {
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

// isStatic refuses a program that needs libraries, which the image has not.
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

// layOut makes the directories. kubelet's lies on a mount that is shared, as it is
// on a node: what is mounted there without care is seen everywhere.
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
	n.base.later(func(context.Context) error { return unmountAll(kubelet) })
	if err := unix.Mount("", kubelet, "", unix.MS_SHARED, ""); err != nil {
		return fmt.Errorf("share the mount %s: %w", kubelet, err)
	}
	if err := copyFile(n.opts.Self, n.path("rootfs/probe")); err != nil {
		return err
	}
	return os.MkdirAll(n.opts.Root, 0o700)
}

func (n *node) path(elem ...string) string {
	return filepath.Join(append([]string{n.dir}, elem...)...)
}

// id gives a new id for a container.
func (n *node) id(kind string) string {
	n.count++
	return fmt.Sprintf("conformance-%s-%s-%d", n.run, kind, n.count)
}

// close removes everything.
func (n *node) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), endTime)
	defer cancel()
	err := n.undo(ctx)
	if n.host != nil {
		err = errors.Join(err, n.host.close())
	}
	return errors.Join(err, n.base.undo(ctx))
}

func copyFile(from, to string) (err error) {
	in, err := os.Open(from) //nolint:gosec // this program
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o755) //nolint:gosec // it is run by containers
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}

// unmountAll unmounts what is mounted at a place, one over the other.
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

// poll is how often something is looked at again.
const poll = 20 * time.Millisecond

// eventually tries until it succeeds, ctx ends, or the time is over.
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
