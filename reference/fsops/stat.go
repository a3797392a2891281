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

// Unit is what is counted.
type Unit string

// The units.
const (
	Bytes  Unit = "BYTES"
	Inodes Unit = "INODES"
)

// Usage is the use of a filesystem as CSI and df count it: what is kept for root is
// neither available nor used.
type Usage struct {
	Unit                   Unit
	Available, Total, Used int64
}

// Report is the use of a filesystem and whether all is well with it. Usage lacks
// what the filesystem does not count, as btrfs inodes.
type Report struct {
	Usage    []Usage
	Abnormal bool
	// Message tells people what is wrong; it is empty where nothing is.
	Message string
	// Reason is the worst of it, such as abi.ReasonReadOnly.
	Reason string
}

// fault is one thing that is wrong with a filesystem.
type fault struct{ reason, text string }

// Stat reports on the filesystem of a root directory; readOnly tells that it was
// mounted so. A filesystem that fails is no error but a report that says so.
func Stat(root int, readOnly bool) (Report, error) {
	var fs unix.Statfs_t
	err := unix.Fstatfs(root, &fs)
	if broken(err) {
		text := fmt.Sprintf("the filesystem does not answer any more (%v): the kernel has shut it down after an error", err)
		return report(nil, []fault{{abi.ReasonShutDown, text}}), nil
	}
	if err != nil {
		return Report{}, fmt.Errorf("statfs: %w", err)
	}
	var wrong []fault
	if fs.Flags&unix.ST_RDONLY != 0 && !readOnly {
		wrong = append(wrong, fault{abi.ReasonReadOnly, "the filesystem became read-only, which the kernel does after an error"})
	}
	found, err := health(root, fs.Type)
	if err != nil {
		return Report{}, err
	}
	return report(usage(&fs), append(wrong, found...)), nil
}

// severity lists the reasons, the worst first.
var severity = []string{abi.ReasonShutDown, abi.ReasonReadOnly, abi.ReasonErrors}

func report(usage []Usage, wrong []fault) Report {
	r := Report{Usage: usage, Abnormal: len(wrong) > 0}
	worst := len(severity)
	var texts []string
	for _, f := range wrong {
		worst = min(worst, slices.Index(severity, f.reason))
		texts = append(texts, f.text)
	}
	if r.Abnormal {
		r.Reason = severity[worst]
	}
	r.Message = strings.Join(texts, "; ")
	return r
}

func usage(fs *unix.Statfs_t) []Usage {
	unit := uint64(fs.Frsize) //nolint:gosec // a size
	all := []Usage{{
		Unit: Bytes, Total: times(fs.Blocks, unit), Available: times(fs.Bavail, unit), Used: times(less(fs.Blocks, fs.Bfree), unit),
	}}
	if fs.Files > 0 {
		all = append(all, Usage{
			Unit: Inodes, Total: times(fs.Files, 1), Available: times(fs.Ffree, 1), Used: times(less(fs.Files, fs.Ffree), 1),
		})
	}
	return all
}

// times multiplies; what does not fit is the most that does.
func times(n, unit uint64) int64 {
	if unit != 0 && n > math.MaxInt64/unit {
		return math.MaxInt64
	}
	return int64(n * unit) //nolint:gosec // just checked
}

// less subtracts: counters are read one after another and may not fit each other.
func less(n, m uint64) uint64 { return n - min(n, m) }

// broken tells the errors of a filesystem or device that fails.
func broken(err error) bool {
	return isAny(err, unix.EIO, unix.EUCLEAN, unix.EBADMSG, unix.ENXIO, unix.ENODEV)
}

func isAny(err error, of ...unix.Errno) bool {
	return slices.ContainsFunc(of, func(is unix.Errno) bool { return errors.Is(err, is) })
}

// health looks for what is wrong.
func health(root int, kind int64) ([]fault, error) {
	dir, err := openDir(root, ".")
	if err == nil {
		defer func() { _ = dir.Close() }()
		// Opening alone asks nothing of the filesystem.
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
