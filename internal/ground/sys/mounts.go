package sys

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"
	"sync"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
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
func IsRemote(path string) (bool, error) {
	fsType, err := TypeAt(path)
	return slices.ContainsFunc(remoteTypes, func(remote string) bool { return strings.HasPrefix(fsType, remote) }), err
}

// mounted is the type of each mounted filesystem, by its mount point. The table tells when it has changed, so that it
// is not read for each path. It tells each open file once: Go's poller, which has all files of os, would take the news.
var mounted struct {
	sync.Mutex
	table int // a descriptor, if there are types
	types map[string]string
}

// TypeAt returns the type of the filesystem that a path lies on, by its name. The path itself is not looked at.
func TypeAt(at string) (string, error) {
	mounted.Lock()
	defer mounted.Unlock()
	changed := mounted.types == nil
	if changed {
		var err error
		if mounted.table, err = unix.Open(MountTable, unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
			return "", err
		}
	} else {
		asked := []unix.PollFd{{Fd: int32(mounted.table), Events: unix.POLLPRI}} //nolint:gosec // a descriptor
		_, err := unix.Poll(asked, 0)
		changed = err != nil || asked[0].Revents != 0
	}
	if changed {
		types, err := mountTypes()
		if mounted.types = types; err != nil {
			CloseFD(mounted.table)
			return "", err
		}
	}
	for at = path.Clean(at); mounted.types[at] == "" && len(at) > 1; {
		at = path.Dir(at)
	}
	return mounted.types[at], nil
}

// mountTypes parses no more of a line than it needs, as Mounts.
func mountTypes() (types map[string]string, err error) {
	types = make(map[string]string)
	_, err = Mounts(context.Background(), MountTable, func(line string) bool {
		mount, filesystem, _ := strings.Cut(line, " - ")
		of, fsType := strings.Fields(mount), strings.Fields(filesystem)
		if len(of) > 4 && len(fsType) > 0 {
			types[strings.Clone(escapedInTable.Replace(of[4]))] = strings.Clone(fsType[0]) // the later one is on top
		}
		return false
	})
	if err != nil {
		return nil, err
	}
	return types, nil
}

var escapedInTable = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\043`, "#", `\134`, `\`)

// MountPoints returns where filesystems are mounted, by the numbers "major:minor" of the wanted devices.
func MountPoints(ctx context.Context, table string, wanted func(device string) bool) (map[string][]string, error) {
	points := make(map[string][]string)
	_, err := Mounts(ctx, table, func(line string) bool {
		device := deviceOfMount(line)
		if wanted(device) {
			if of := strings.SplitN(line, " ", 6); len(of) == 6 {
				points[device] = append(points[device], escapedInTable.Replace(of[4]))
			}
		}
		return false
	})
	return points, err
}

// deviceOfMount returns the number of a mount's device. The table has another number for btrfs, whose source is the device.
func deviceOfMount(line string) string {
	rest := line
	for range 2 {
		_, rest, _ = strings.Cut(rest, " ")
	}
	number, _, _ := strings.Cut(rest, " ")
	_, source, isBtrfs := strings.Cut(rest, " - btrfs ")
	if !isBtrfs {
		return number
	}
	source, _, _ = strings.Cut(source, " ")
	source = escapedInTable.Replace(source)
	var st unix.Stat_t
	if _, below := Below("/dev", path.Clean(source)); !below || unix.Stat(source, &st) != nil { // another path may hang
		return number
	}
	return fmt.Sprintf("%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
}
