package fsops

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

type fault struct{ reason, text string }

// Stat reports usage and health of the filesystem of a root directory; readOnly means that
// it was mounted read-only. A filesystem that fails is not an error: the report says so.
//
// Usage is as of CSI and df: blocks reserved for root are neither available nor used. btrfs does not count inodes.
func Stat(root int, readOnly bool) (abi.StatsReply, error) {
	var fs unix.Statfs_t
	err := unix.Fstatfs(root, &fs)
	if broken(err) {
		text := fmt.Sprintf("the filesystem does not answer any more (%v): the kernel has shut it down after an error", err)
		return report(nil, []fault{{abi.ReasonShutDown, text}}), nil
	}
	if err != nil {
		return abi.StatsReply{}, fmt.Errorf("statfs: %w", err)
	}
	var wrong []fault
	if fs.Flags&unix.ST_RDONLY != 0 && !readOnly {
		wrong = append(wrong, fault{abi.ReasonReadOnly, "the filesystem became read-only, which the kernel does after an error"})
	}
	found, err := health(root, fs.Type)
	if err != nil {
		return abi.StatsReply{}, err
	}
	return report(usage(&fs), append(wrong, found...)), nil
}

// severity lists the reasons, worst first.
var severity = []string{abi.ReasonShutDown, abi.ReasonReadOnly, abi.ReasonErrors}

// report combines the faults: the worst reason, and all texts.
func report(usage []abi.Usage, wrong []fault) abi.StatsReply {
	worst := len(severity)
	var texts []string
	for _, f := range wrong {
		worst = min(worst, slices.Index(severity, f.reason))
		texts = append(texts, f.text)
	}
	condition := &abi.Condition{Abnormal: len(wrong) > 0, Message: strings.Join(texts, "; ")}
	if condition.Abnormal {
		condition.Reason = severity[worst]
	}
	return abi.StatsReply{Usage: usage, Condition: condition}
}

func usage(fs *unix.Statfs_t) []abi.Usage {
	unit := uint64(fs.Frsize) //nolint:gosec // a size
	all := []abi.Usage{{
		Unit: abi.UnitBytes, Total: times(fs.Blocks, unit), Available: times(fs.Bavail, unit), Used: times(less(fs.Blocks, fs.Bfree), unit),
	}}
	if fs.Files > 0 {
		all = append(all, abi.Usage{
			Unit: abi.UnitInodes, Total: times(fs.Files, 1), Available: times(fs.Ffree, 1), Used: times(less(fs.Files, fs.Ffree), 1),
		})
	}
	return all
}

// times multiplies, and returns math.MaxInt64 on overflow.
func times(n, unit uint64) int64 {
	if unit != 0 && n > math.MaxInt64/unit {
		return math.MaxInt64
	}
	return int64(n * unit) //nolint:gosec // just checked
}

// less subtracts, and returns 0 instead of a negative number: the counters are not read at one moment.
func less(n, m uint64) uint64 { return n - min(n, m) }

// broken reports whether an error means that the filesystem or its device fails.
func broken(err error) bool {
	return isAny(err, unix.EIO, unix.EUCLEAN, unix.EBADMSG, unix.ENXIO, unix.ENODEV)
}

func isAny(err error, of ...unix.Errno) bool {
	return slices.ContainsFunc(of, func(is unix.Errno) bool { return errors.Is(err, is) })
}

func health(root int, kind int64) ([]fault, error) {
	dir, err := openDir(root, ".")
	if err == nil {
		defer func() { _ = dir.Close() }()
		// Opening it alone reads nothing from the filesystem.
		if _, reading := dir.Readdirnames(1); broken(reading) {
			err = reading
		}
	}
	if broken(err) {
		text := fmt.Sprintf("the root directory cannot be read (%v): the kernel has shut the filesystem down after an error, or the device fails", err)
		return []fault{{abi.ReasonShutDown, text}}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the root directory: %w", err)
	}
	switch kind {
	case unix.EXT4_SUPER_MAGIC:
		return extHealth(fdOf(dir)), nil
	case unix.BTRFS_SUPER_MAGIC:
		return btrfsHealth(fdOf(dir)), nil
	}
	return nil, nil
}

// extHealth reports what stopped an ext4, and the errors in its superblock, which stay
// there until e2fsck has repaired it. Without /proc and /sys nothing is known.
func extHealth(root int) []fault {
	device, err := deviceName(root)
	if err != nil {
		return nil
	}
	var wrong []fault
	options := strings.Split(contents("/proc/fs/ext4/"+device+"/options"), "\n")
	if slices.Contains(options, "shutdown") {
		wrong = append(wrong, fault{abi.ReasonShutDown, "the filesystem was shut down: it reads and writes nothing until it is mounted anew"})
	}
	if slices.Contains(options, "emergency_ro") {
		wrong = append(wrong, fault{abi.ReasonReadOnly, "the kernel has stopped writing to the filesystem after an error"})
	}
	place := "/sys/fs/ext4/" + device + "/"
	n := contents(place + "errors_count")
	if n == "" || n == "0" {
		return wrong
	}
	text := fmt.Sprintf("ext4 has errors on record (%s)", n)
	if where := contents(place + "last_error_func"); where != "" {
		text += ", the last one of " + where
	}
	return append(wrong, fault{abi.ReasonErrors, text + ": it needs e2fsck while it is not mounted"})
}

// contents reads a small file of the kernel; a missing one is empty. With an os.File, stats would take longer.
func contents(path string) string {
	fd, _ := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	defer sys.CloseFD(fd)
	var raw [4096]byte // one page, the most that the kernel returns
	n, _ := unix.Read(fd, raw[:])
	return strings.TrimSpace(string(raw[:max(n, 0)]))
}

func deviceName(root int) (string, error) {
	var st unix.Stat_t
	if err := unix.Fstat(root, &st); err != nil {
		return "", err
	}
	dev := uint64(st.Dev) //nolint:unconvert // narrower on other architectures
	link, err := os.Readlink(fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(dev), unix.Minor(dev)))
	return filepath.Base(link), err
}

func btrfsHealth(root int) []fault {
	var fs btrfsFSInfo
	if _, err := Ioctl(root, btrfsIocFSInfo, &fs); err != nil {
		return nil
	}
	var wrong []fault
	for id := uint64(1); id <= min(fs.MaxID, btrfsMostDevices); id++ {
		stats := btrfsDevStats{DevID: id, Items: uint64(len(btrfsCounters))}
		if _, err := Ioctl(root, btrfsIocGetDevStats, &stats); err != nil {
			continue // there is no such device
		}
		for i, name := range btrfsCounters {
			if n := stats.Values[i]; n > 0 {
				wrong = append(wrong, fault{abi.ReasonErrors, fmt.Sprintf("btrfs counts %d %s of its device %d", n, name, id)})
			}
		}
	}
	return wrong
}
