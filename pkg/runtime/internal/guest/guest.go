// Package guest checks what a sandbox says. A sandbox may be hostile: its answers are
// bounded, checked, and made safe to show.
package guest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

const (
	// maxUsages bounds the usages in one answer. There are two units.
	maxUsages = 16
	// MaxMessage bounds the text of a volume's condition.
	MaxMessage = 1 << 10
)

// ErrAbsurd marks numbers that cannot be true.
var ErrAbsurd = errors.New("absurd")

// Absurdf makes such an error.
func Absurdf(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrAbsurd}, args...)...)
}

// Unit returns the unit of a number in protobuf.
func Unit(n int64) volume.Unit {
	if n == int64(volume.UnitBytes) || n == int64(volume.UnitInodes) {
		return volume.Unit(n)
	}
	return volume.UnitUnknown
}

// Report checks a guest's answer to stats, and leaves out usages of unknown units and inodes
// that the filesystem does not count. condition is nil if the answer had none.
func Report(said []volume.Usage, condition *volume.Condition) (report volume.Report, err error) {
	if len(said) > maxUsages {
		return volume.Report{}, errors.New("it lists too many usages")
	}
	for _, u := range said {
		switch {
		case u.Unit == volume.UnitUnknown:
			continue
		case min(u.Available, u.Used, u.Total) < 0 || u.Available > u.Total || u.Used > u.Total:
			return volume.Report{}, Absurdf("%d available and %d used of %d in all", u.Available, u.Used, u.Total)
		case u.Total == 0 && u.Unit == volume.UnitBytes:
			return volume.Report{}, Absurdf("a filesystem of no size")
		case u.Total == 0:
			continue // a filesystem without inodes, such as btrfs
		case slices.ContainsFunc(report.Usage, func(before volume.Usage) bool { return before.Unit == u.Unit }):
			return volume.Report{}, errors.New("it gives the same unit twice")
		}
		report.Usage = append(report.Usage, u)
	}
	if condition != nil {
		report.Condition = &volume.Condition{
			Abnormal: condition.Abnormal, Message: Printable(condition.Message, MaxMessage), Reason: word(condition.Reason),
		}
	}
	if len(report.Usage) == 0 && report.Condition == nil {
		return volume.Report{}, errors.New("it holds neither a usage of bytes or inodes nor a condition")
	}
	return report, nil
}

// maxReason bounds the reason of a volume's condition.
const maxReason = 64

// word returns a reason that the Kubernetes API accepts, or "".
func word(s string) string {
	other := func(r rune) bool { return (r < 'A' || r > 'Z') && (r < 'a' || r > 'z') }
	if len(s) > maxReason || strings.ContainsFunc(s, other) {
		return ""
	}
	return s
}

// CheckSize compares a report with the volume's device: a filesystem is never larger.
func CheckSize(v *volume.Volume, report volume.Report) error {
	device, known := claim.DeviceSize(v.Device)
	for _, usage := range report.Usage {
		if known && usage.Unit == volume.UnitBytes && usage.Total > device {
			return Absurdf("%d bytes in all, on a device of %d", usage.Total, device)
		}
	}
	return nil
}

// MaxErrorText bounds the part of a sandbox's error text that is in ours.
const MaxErrorText = 512

// Printable makes a guest's text safe to show: bounded, valid UTF-8, nothing
// that moves a terminal's cursor or starts a new log line.
func Printable(s string, most int) string {
	if len(s) > 4*most {
		s = s[:4*most] // bounds the work, too
	}
	clean := strings.Map(func(r rune) rune {
		switch {
		case r == utf8.RuneError:
			return '?'
		case unicode.IsSpace(r):
			return ' '
		case !sys.IsPrintable(r):
			return '?'
		}
		return r
	}, s)
	return sys.ClipTo(strings.TrimSpace(clean), most-len("..."))
}

// ContextError is the error of a call whose context has ended. who was asked, such as "Kata
// sandbox 1234", or "" if nobody was.
func ContextError(v *volume.Volume, who string, err error) error {
	kind := volume.Timeout
	text := "did not answer in time; it may be overloaded or hung"
	if errors.Is(err, context.Canceled) {
		kind, text = volume.Canceled, "was not waited for: the caller went away"
	}
	if who == "" {
		return volume.Errorf(kind, "volume %s: the call ended before anything was done: %w", v.Target, err)
	}
	return volume.Errorf(kind, "volume %s: %s %s: %w", v.Target, who, text, err)
}
