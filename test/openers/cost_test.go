//go:build system

package openers

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
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
		check.Must(t, check.Err(f.Await(t.Context(), openers.Query{FD: s.fd, Own: 1}, patience)))
		times[i] = time.Since(start)
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

// TestServersBesideManyDescriptors is of a pod whose many processes have many descriptors, and the name of a server: to look
// through them takes longer than anybody waits. The servers of other devices are found, and so is that a device is in use.
func TestServersBesideManyDescriptors(t *testing.T) {
	const callers, most = 3, 30 * time.Second
	raw, server := check.Value(os.ReadFile("/bin/cat"))(t), filepath.Join(t.TempDir(), "rbd-nbd")
	check.Must(t, os.WriteFile(server, raw, 0o700)) //nolint:gosec // a program
	f, served, used := counting(t), device(t), device(t)
	rig.HoldBy(t, inRole("pod", server))
	rig.HoldBy(t, opening(t, server, "<>", served.path))
	rig.HoldBy(t, opening(t, "cat", "<>", used.path))
	var group sync.WaitGroup
	for _, s := range []subject{used, served} {
		for range callers {
			group.Go(func() {
				err := check.Until(most, time.Millisecond, func() error { // one whose turn does not come in time does not know
					users, err := f.Await(t.Context(), openers.Query{FD: s.fd, Own: 1, Servers: []string{"rbd-nbd"}}, 0)
					if err == nil && (users.Names == "") != (s == served) {
						err = fmt.Errorf("in use by %q", users.Names)
					}
					return err
				})
				check.NoError(t, err, "%s", s.path)
			})
		}
		group.Wait()
	}
}

// holdPod is the role of a pod with 120 processes of a program, of 19,000 descriptors each.
func holdPod(program string) error {
	null, err := unix.Open("/dev/null", unix.O_RDONLY, 0)
	for i := 0; i < 19_000 && err == nil; i++ {
		_, err = unix.Dup(null)
	}
	if err != nil {
		return err
	}
	script := `exec 4<&0; for i in $(seq 120); do "$0" <&4 >/dev/null & done; echo open; cat >/dev/null`
	return unix.Exec("/bin/sh", []string{"sh", "-c", script, program}, []string{"PATH=/usr/bin:/bin"})
}
