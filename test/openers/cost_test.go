//go:build system

package openers

import (
	"fmt"
	"slices"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/openers"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// TestLookDoesNotGrowWithDescriptors compares a look on this node with one beside 50,000 more
// descriptors. Of several rounds the best counts: the machine has other things to do.
func TestLookDoesNotGrowWithDescriptors(t *testing.T) {
	const rounds, processes, each = 3, 5, 10_000
	f, s := counting(t), device(t)
	few, many := time.Hour, time.Hour
	for range rounds {
		few = min(few, medianLook(t, f, s))
		var others []*rig.Holder
		for range processes {
			others = append(others, rig.HoldBy(t, inRole("many", strconv.Itoa(each))))
		}
		many = min(many, medianLook(t, f, s))
		for _, other := range others {
			other.End()
		}
	}
	t.Logf("a look takes %v, and %v beside %d descriptors", few, many, processes*each)
	check.That(t, many <= 2*few, "a look takes %v beside %d descriptors, and %v without them", many, processes*each, few)
}

func medianLook(t *testing.T, f *openers.Finder, s subject) time.Duration {
	t.Helper()
	wantUsers(t, f, openers.Query{FD: s.fd, Own: 1}, "")
	times := make([]time.Duration, 2000)
	for i := range times {
		start := time.Now()
		_, err := f.Await(t.Context(), openers.Query{FD: s.fd, Own: 1}, patience)
		times[i] = time.Since(start)
		check.Must(t, err)
	}
	slices.Sort(times)
	return times[len(times)/2]
}

// holdMany is the role of a process with many descriptors.
func holdMany(argument string) error {
	n, err := strconv.Atoi(argument)
	for i := 0; i < n && err == nil; i++ {
		_, err = unix.Open("/dev/null", unix.O_RDONLY, 0)
	}
	if err != nil {
		return fmt.Errorf("open %d files (see ulimit -Hn): %w", n, err)
	}
	return untilEnd()
}
