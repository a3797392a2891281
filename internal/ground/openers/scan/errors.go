package scan

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

var errBlind = errors.New("only the processes of crust-proxy's own container can be seen: " + volume.TextNeedsHost)

func hiddenError(err error) error {
	return fmt.Errorf("the processes of this node cannot be seen (is /proc mounted with hidepid?): %w", err)
}

func tooSlowError(bound time.Duration, at position) error {
	return fmt.Errorf("the descriptors of all processes could not be read within %s: the scan was at %s", bound, at.table)
}

func hungError(hung map[*walk]position) error {
	var names []string
	for _, at := range hung {
		names = append(names, at.table.String())
	}
	slices.Sort(names)
	return fmt.Errorf("%d looks at descriptors hang: those of %s", len(hung), strings.Join(slices.Compact(names), ", "))
}

func processError(h Holder, err error) error { return fmt.Errorf("%s: %w", h, err) }

func lookError(h Holder, fd string, err error) error {
	return fmt.Errorf("%s, descriptor %s: %w", h, fd, err)
}

func budgetError(most int) error { return fmt.Errorf("it has more than %d descriptors", most) }

func unreadableError(err error) error {
	return fmt.Errorf("its descriptors cannot be read: %w", err)
}

// String names the process for a person, and never hangs. There is none before the first process.
func (t *table) String() string {
	if t == nil {
		return "no process"
	}
	return Holder{PID: t.pid, Program: commOf(t.dir)}.String()
}
