package conformance

import (
	"errors"
	"fmt"
	"strings"
)

// Lines prints results. Those that follow each other and were skipped for one reason are one line.
type Lines struct {
	Print   func(Result) error
	skipped []Result
	err     error
}

// Add prints a result, or keeps it until the next one that was not skipped for the same reason.
func (l *Lines) Add(r Result) {
	if len(l.skipped) > 0 && (r.Status != Skip || r.Seen != l.skipped[0].Seen) {
		l.err = l.End()
	}
	if r.Status == Skip {
		l.skipped = append(l.skipped, r)
		return
	}
	l.err = errors.Join(l.err, l.Print(r))
}

// End prints what was kept. It returns all errors of Print.
func (l *Lines) End() error {
	if len(l.skipped) == 0 {
		return l.err
	}
	one := l.skipped[0]
	if len(l.skipped) > 1 {
		var names []string
		for _, r := range l.skipped {
			names = append(names, r.Name)
		}
		one.Name, one.Demand = fmt.Sprintf("%d demands", len(names)), strings.Join(names, ", ")
	}
	l.skipped = nil
	return errors.Join(l.err, l.Print(one))
}
