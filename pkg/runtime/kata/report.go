package kata

import (
	"errors"
	"fmt"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// maxUsages bounds the usages in one answer. There are two units.
const maxUsages = 16

func absurdf(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{errAbsurd}, args...)...)
}

// builder collects what a guest said into a checked report.
type builder struct {
	report deferral.Report
}

func (b *builder) usage(u deferral.Usage) error {
	if u.Unit != deferral.UnitBytes && u.Unit != deferral.UnitInodes {
		return nil // a unit that we do not know helps nobody
	}
	if u.Available > u.Total || u.Used > u.Total {
		return absurdf("%d available and %d used of %d in all", u.Available, u.Used, u.Total)
	}
	if u.Total == 0 {
		if u.Unit == deferral.UnitInodes {
			return nil // a filesystem without inodes, such as btrfs
		}
		return absurdf("a filesystem of no size")
	}
	for _, before := range b.report.Usage {
		if before.Unit == u.Unit {
			return errors.New("it gives the same unit twice")
		}
	}
	b.report.Usage = append(b.report.Usage, u)
	return nil
}

func (b *builder) condition(abnormal bool, message string) {
	b.report.Condition = &deferral.Condition{Abnormal: abnormal, Message: printable(message, maxMessage)}
}

func (b *builder) done() (deferral.Report, error) {
	if len(b.report.Usage) == 0 && b.report.Condition == nil {
		return deferral.Report{}, errors.New("it holds neither a usage of bytes or inodes nor a condition")
	}
	return b.report, nil
}
