package sys

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
)

// MountTable is the mount table of this process.
const MountTable = "/proc/self/mountinfo"

// Mounts reads a mount table and returns the mounts whose lines are wanted. The table can
// have thousands of lines, so read it once for all volumes. Only wanted lines are parsed: a
// line in a form that only a newer kernel writes does no harm otherwise.
func Mounts(ctx context.Context, table string, wanted func(line string) bool) ([]*mountinfo.Info, error) {
	file, err := os.Open(table) //nolint:gosec // the kernel's file, or a test's
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	var few bytes.Buffer
	lines := bufio.NewReaderSize(file, 64<<10)
	for err == nil {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		var line string
		if line, err = lines.ReadString('\n'); wanted(line) {
			few.WriteString(line)
		}
	}
	if !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%s: %w", table, err)
	}
	return mountinfo.GetMountsFromReader(&few, nil)
}

// remoteTypes are prefixes of the types of filesystems with a server. While the server does not answer,
// a process that waits for it cannot be killed.
var remoteTypes = []string{"9p", "afs", "autofs", "ceph", "cifs", "fuse", "lustre", "nfs", "smb", "virtiofs"}

// IsRemote reports whether a path lies on such a filesystem, by its name. The path itself is not looked at.
func IsRemote(ctx context.Context, path string) (bool, error) {
	mounts, err := Mounts(ctx, MountTable, func(line string) bool {
		of := strings.SplitN(line, " ", 6)
		return len(of) == 6 && Within(of[4], path)
	})
	var top mountinfo.Info
	for _, m := range mounts {
		if len(m.Mountpoint) >= len(top.Mountpoint) { // the later one is on top
			top = *m
		}
	}
	return slices.ContainsFunc(remoteTypes, func(remote string) bool { return strings.HasPrefix(top.FSType, remote) }), err
}

// DeviceOfMount returns the third field of a line of a mount table, the device number "major:minor".
func DeviceOfMount(line string) string {
	for range 2 {
		_, line, _ = strings.Cut(line, " ")
	}
	number, _, _ := strings.Cut(line, " ")
	return number
}
