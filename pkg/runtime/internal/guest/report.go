// Package guest is what is believed of a sandbox, which may be hostile: bounded,
// checked, and fit to be shown.
package guest

import (
	"errors"
	"fmt"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// MaxUsages bounds the usages in one answer. There are two units.
const MaxUsages = 16

// MaxMessage bounds the text of a volume's condition.
const MaxMessage = 1 << 10

// ErrAbsurd marks numbers that cannot be true.
var ErrAbsurd = errors.New("absurd")

// Absurdf says which.
func Absurdf(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrAbsurd}, args...)...)
}

// Report collects what a guest said into a checked report.
type Report struct {
	report volume.Report
}

// Usage takes one measure, or says why it cannot be true.
func (b *Report) Usage(u volume.Usage) error {
	if u.Unit != volume.UnitBytes && u.Unit != volume.UnitInodes {
		return nil // a unit that we do not know helps nobody
	}
	if u.Available < 0 || u.Used < 0 || u.Total < 0 {
		return Absurdf("%d available and %d used of %d in all", u.Available, u.Used, u.Total)
	}
	if u.Available > u.Total || u.Used > u.Total {
		return Absurdf("%d available and %d used of %d in all", u.Available, u.Used, u.Total)
	}
	if u.Total == 0 {
		if u.Unit == volume.UnitInodes {
			return nil // a filesystem without inodes, such as btrfs
		}
		return Absurdf("a filesystem of no size")
	}
	for _, before := range b.report.Usage {
		if before.Unit == u.Unit {
			return errors.New("it gives the same unit twice")
		}
	}
	b.report.Usage = append(b.report.Usage, u)
	return nil
}

// Condition takes the health of the volume.
func (b *Report) Condition(abnormal bool, message string) {
	b.report.Condition = &volume.Condition{Abnormal: abnormal, Message: Printable(message, MaxMessage)}
}

// Done gives the report, if it holds anything.
func (b *Report) Done() (volume.Report, error) {
	if len(b.report.Usage) == 0 && b.report.Condition == nil {
		return volume.Report{}, errors.New("it holds neither a usage of bytes or inodes nor a condition")
	}
	return b.report, nil
}

// CheckSize compares what a guest says with the device it has: a filesystem is
// never larger.
func CheckSize(report volume.Report, device int64) error {
	for _, usage := range report.Usage {
		if usage.Unit == volume.UnitBytes && usage.Total > device {
			return Absurdf("%d bytes in all, on a device of %d", usage.Total, device)
		}
	}
	return nil
}
