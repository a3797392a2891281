package fsops

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// fault is one thing that is wrong with a filesystem.
type fault struct{ reason, text string }

// Stat reports usage and health of the filesystem of a root directory; readOnly means that
// it was mounted read-only. A filesystem that fails is not an error: the report says so.
//
// Usage is counted as CSI and df do: blocks reserved for root are neither available nor
// used. What the filesystem does not count is omitted, such as btrfs inodes.
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

// less subtracts, and returns 0 instead of a negative number: the counters are not read at
// one moment.
func less(n, m uint64) uint64 { return n - min(n, m) }

// broken reports whether an error means that the filesystem or its device fails.
func broken(err error) bool {
	return isAny(err, unix.EIO, unix.EUCLEAN, unix.EBADMSG, unix.ENXIO, unix.ENODEV)
}

func isAny(err error, of ...unix.Errno) bool {
	return slices.ContainsFunc(of, func(is unix.Errno) bool { return errors.Is(err, is) })
}

// health lists what is wrong with the filesystem.
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
