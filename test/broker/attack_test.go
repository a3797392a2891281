//go:build system

package broker

import (
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/openers"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// attacks are what processes of others may do, each of which stopped all volumes of a node that
// read the descriptors of all processes. What a scan makes of them, the tests of that show.
var attacks = map[string]func(t *testing.T) (end func()){
	"a shared table":      attackBySharing,
	"a failed filesystem": attackByFailing,
	"many descriptors":    attackByMany,
}

func attackBySharing(t *testing.T) (end func()) {
	t.Helper()
	const nobody = 65534
	cmd := inRole("shared table", strconv.Itoa(mostDescriptors(t, 20_000)))
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	return rig.HoldBy(t, cmd).End
}

func attackByFailing(t *testing.T) (end func()) {
	t.Helper()
	at := t.TempDir()
	check.Must(t, unix.Mount(rig.Disk(t, 320*mib, "xfs"), at, "xfs", 0, ""))
	t.Cleanup(func() { rig.UnmountAll(t, at) })
	file := filepath.Join(at, "file")
	by := rig.HoldBy(t, inRole("shut down", file))
	var st unix.Stat_t
	if err := unix.Stat(file, &st); err == nil {
		t.Error("the file can be looked at: this tests nothing")
	}
	return by.End
}

// attackByMany are several processes where the limit for one is low.
func attackByMany(t *testing.T) (end func()) {
	t.Helper()
	var ends []func()
	for left := 200_000; left > 0; {
		many := mostDescriptors(t, left)
		ends = append(ends, rig.HoldBy(t, inRole("many", strconv.Itoa(many))).End)
		left -= many
	}
	return func() {
		for _, end := range ends {
			end()
		}
	}
}

// TestAttacks: stage and unstage go on, and soon.
func TestAttacks(t *testing.T) {
	const most = 20 * time.Second
	methods := finders(t)
	for name, attack := range attacks {
		t.Run(name, func(t *testing.T) {
			end := attack(t)
			for method, finder := range methods {
				if method == openers.Scans && name == "many descriptors" {
					continue // it has to read them all
				}
				n := newNode(t)
				n.use(finder)
				in := n.instruction("pod-1", rig.Disk(t, 16*mib, ""))
				began := time.Now()
				n.goesOn(func() error { _, err := n.Defer(t.Context(), in); return err })
				stage := time.Since(began)
				n.goesOn(func() error { _, err := n.Release(t.Context(), in.Target); return err })
				unstage := time.Since(began) - stage
				t.Logf("%s: stage took %v and unstage %v", method, stage, unstage)
				if stage > most || unstage > most {
					t.Errorf("%s: stage took %v and unstage %v", method, stage, unstage)
				}
				n.noLeftovers()
			}
			end()
		})
	}
}
