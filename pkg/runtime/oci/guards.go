package oci

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// guard is a guard mount, or a bind mount of a part of one: the volume that it stands
// for, and the sub-directory of that.
type guard struct {
	volume string
	sub    string
	point  string // where it is mounted
	gone   bool   // the sub-directory was removed under the mount
}

// guards are the guard mounts of a mount namespace, by the id of the mount.
type guards map[int]guard

// readGuards reads them from a mountinfo file. Only lines that can be guards are
// taken apart: a node has thousands of others.
func readGuards(file string) (guards, error) {
	f, err := os.Open(file) //nolint:gosec // the kernel's file, or a test's
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	found := make(guards)
	lines := bufio.NewReaderSize(f, 64<<10)
	for {
		line, err := lines.ReadBytes('\n')
		if bytes.Contains(line, []byte(" "+abi.GuardPrefix)) {
			if parseErr := found.add(line); parseErr != nil {
				return nil, parseErr
			}
		}
		if errors.Is(err, io.EOF) {
			return found, nil
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
	}
}

// deleted is what the kernel appends to the root of a mount whose directory was
// removed.
const deleted = "//deleted"

func (g guards) add(line []byte) error {
	mounts, err := mountinfo.GetMountsFromReader(bytes.NewReader(line), nil)
	if err != nil {
		return err
	}
	for _, m := range mounts {
		volume, ok := strings.CutPrefix(m.Source, abi.GuardPrefix)
		if !ok || m.FSType != "tmpfs" || !abi.IsDirName(volume) {
			continue
		}
		sub, gone := strings.CutSuffix(m.Root, deleted)
		g[m.ID] = guard{volume: volume, sub: strings.Trim(sub, "/"), point: m.Mountpoint, gone: gone}
	}
	return nil
}

// mountOf is the id of the mount that a descriptor lies on. It asks the kernel
// alone: a network filesystem that hangs is not waited for.
func mountOf(fd int) (id int, isRoot bool, err error) {
	var st unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_MNT_ID, &st); err != nil {
		return 0, false, err
	}
	return int(st.Mnt_id), st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0, nil //nolint:gosec // the kernel's ids are ints
}
