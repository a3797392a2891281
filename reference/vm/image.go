package vm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/reference/vm/wire"
)

// checkCopies refuses mounts that a copy cannot replace. Writable files are copied: every
// container has some that nothing else reads while it runs, such as its termination message.
func checkCopies(binds []bind) error {
	for _, b := range binds {
		info, err := os.Stat(b.source)
		switch {
		case err != nil:
			return err
		case b.destination == "" || info.Mode().IsRegular() || info.IsDir() && b.readOnly:
		case info.IsDir():
			return fmt.Errorf("its mount at %s is a directory of the node that it may write to, and no virtiofsd shows it to the virtual machine: "+
				"mount it read-only, take a deferred volume, or install virtiofsd", b.destination)
		default:
			return fmt.Errorf("its mount at %s is neither a file nor a directory, and no virtiofsd shows it to the virtual machine", b.destination)
		}
	}
	return nil
}

// imageName is the volume name of the image of a tree.
func imageName(tree string) string { return abi.DirName(tree) }

// attachImage mounts the image of a tree in the guest and returns its volume name.
func (v *volumes) attachImage(ctx context.Context, tree string, image *os.File) (name string, err error) {
	name = imageName(tree)
	if _, err := v.get(name); err == nil {
		return "", errors.Join(errors.New("the image of an earlier container by this id is still in use"), image.Close())
	}
	return name, v.attach(ctx, name, abi.Info{FSType: "ext4", Options: []string{"ro"}}, func() (*os.File, error) { return image, nil })
}

const (
	mkfs = "/sbin/mkfs.ext4"
	// copyTimeout bounds the copy: kubelet waits two minutes for a container.
	copyTimeout = 100 * time.Second
)

// makeImage copies a tree into a filesystem of its own, in an unnamed file, which the kernel
// deletes when it is closed.
func makeImage(ctx context.Context, cfg Config, tree string) (image *os.File, err error) {
	if err := os.MkdirAll(cfg.ImageDir, 0o700); err != nil {
		return nil, err
	}
	fd, err := unix.Open(cfg.ImageDir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("a file in %s: %w", cfg.ImageDir, err)
	}
	file := os.NewFile(uintptr(fd), "image")
	defer func() { _ = file.Close() }()
	size, inodes, err := measure(ctx, tree)
	if err != nil {
		return nil, err
	}
	if most := int64(cfg.MaxImageMiB) << 20; size > most {
		return nil, fmt.Errorf("%d bytes are needed, more than maxImageMiB in %s allows", size, cfg.file)
	}
	if err := formatImage(ctx, file, tree, size, inodes); err != nil {
		return nil, err
	}
	return os.Open(fmt.Sprintf("/proc/self/fd/%d", fd))
}

// formatImage makes the filesystem. mkfs is killed when this process ends.
func formatImage(ctx context.Context, file *os.File, tree string, size, inodes int64) error {
	const blockSize = 4096
	cmd := exec.CommandContext(ctx, mkfs, "-q", "-F", "-d", tree, "-b", strconv.Itoa(blockSize), "-m", "0", //nolint:gosec // our own tree
		"-N", strconv.FormatInt(inodes, 10), "-O", "^has_journal,^resize_inode", "-E", "nodiscard", "/proc/self/fd/3", strconv.FormatInt(size/blockSize, 10))
	cmd.ExtraFiles, cmd.Dir, cmd.Env = []*os.File{file}, "/", []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	runtime.LockOSThread() // Pdeathsig is about the thread
	defer runtime.UnlockOSThread()
	output, err := cmd.CombinedOutput()
	// mkfs can skip a file with a warning and succeed. Sockets need no copy.
	complaints := slices.DeleteFunc(strings.Split(string(output), "\n"), func(line string) bool {
		return strings.TrimSpace(line) == "" || strings.Contains(line, "ignoring socket")
	})
	if err != nil || len(complaints) > 0 {
		return fmt.Errorf("mkfs.ext4: %w: %s", cmp.Or(ctx.Err(), err, errIncomplete), wire.Text(strings.Join(complaints, "; ")))
	}
	return nil
}

var errIncomplete = errors.New("the copy is incomplete")

// measure returns the size of a filesystem for a tree. The size is generous: the file is
// sparse.
func measure(ctx context.Context, tree string) (size, inodes int64, err error) {
	const least, perInode = 16 << 20, 12 << 10
	err = filepath.WalkDir(tree, func(_ string, entry fs.DirEntry, err error) error {
		if err = errors.Join(err, ctx.Err()); err != nil {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		inodes++
		size += min(info.Size(), math.MaxInt64/2-size)
		return nil
	})
	return size + size/16 + inodes*perInode + least, inodes + 16, err
}
