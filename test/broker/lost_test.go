//go:build system

package broker

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// fdStore keeps descriptors as systemd does.
type fdStore struct{ files map[string]*os.File }

func (s *fdStore) StoreFD(name string, file *os.File) error {
	fd, err := unix.FcntlInt(file.Fd(), unix.F_DUPFD_CLOEXEC, 3)
	if err == nil {
		s.files[name] = os.NewFile(uintptr(fd), name)
	}
	return err
}

func (s *fdStore) RemoveFD(name string) error {
	file := s.files[name]
	delete(s.files, name)
	if file == nil {
		return nil
	}
	return file.Close()
}

// restartWith restarts the broker with the descriptors that the store kept.
func (n *node) restartWith(s *fdStore) {
	n.t.Helper()
	n.Close()
	n.startWith(s)
}

func (n *node) startWith(s *fdStore) {
	n.t.Helper()
	n.cfg.Kept = make(map[string]*os.File)
	for name, file := range maps.Clone(s.files) {
		fd := check.Value(unix.FcntlInt(file.Fd(), unix.F_DUPFD_CLOEXEC, 3))(n.t)
		n.cfg.Kept[name] = os.NewFile(uintptr(fd), name)
	}
	n.start()
}

func (n *node) recordOf(v *volume.Volume) string {
	return filepath.Join(n.cfg.StateDir, "volumes", string(v.Key)+".json")
}

// wantHeld checks whether anybody could mount the device.
func wantHeld(t *testing.T, disk string, want bool) {
	t.Helper()
	err := rig.Exclusive(disk)
	check.That(t, errors.Is(err, unix.EBUSY) == want, "opening %s exclusively: %v; want held: %v", disk, err, want)
}

// TestLostRecordFreesNothing: whatever became of a record, the device of a sandbox
// that lives stays claimed, and guard and projection stay, until it is unpublished.
func TestLostRecordFreesNothing(t *testing.T) {
	other := check.Value(os.ReadFile("/proc/self/stat"))(t)
	for name, damage := range map[string]func(t *testing.T, record string){
		"truncated": func(t *testing.T, record string) { check.Must(t, os.Truncate(record, 70)) },
		"empty":     func(t *testing.T, record string) { check.Must(t, os.Truncate(record, 0)) },
		"foreign":   func(t *testing.T, record string) { check.Must(t, os.WriteFile(record, other, 0o600)) },
		"unreadable": func(t *testing.T, record string) {
			check.Must(t, os.Remove(record))
			check.Must(t, os.Symlink("/etc/passwd", record))
		},
		"newer":   func(t *testing.T, record string) { check.Must(t, os.WriteFile(record, []byte(`{"version":9}`), 0o600)) },
		"removed": func(t *testing.T, record string) { check.Must(t, os.Remove(record)) },
	} {
		for _, known := range []string{"projection", "claim"} {
			t.Run(name+"/"+known, func(t *testing.T) {
				t.Parallel() // it waits most of the time
				testLostRecord(t, damage, known)
			})
		}
	}
}

// testLostRecord has the device known by its projection alone, or by the kept claim.
func testLostRecord(t *testing.T, damage func(*testing.T, string), known string) {
	n, store := newNode(t), &fdStore{files: make(map[string]*os.File)}
	if known == "claim" {
		n.cfg.Keeper = store
		n.restartWith(store)
	}
	disk := rig.Disk(t, 16*mib, "")
	v := n.stage(n.instruction("pod-1", disk))
	if known == "claim" {
		n.runtime.volumes = nil // it cannot be read either
	}
	n.runtime.sandbox = "living"
	n.Close()
	damage(t, n.recordOf(v))
	for range 2 {
		n.startWith(store)
		check.Must(t, check.Err(n.Reconcile(t.Context())))
		wantHeld(t, disk, true)
		mounts := rig.MountPoints(v.Target)
		check.That(t, len(mounts) == 1 && n.runtime.published[v.Key], "guard or projection went: %v", mounts)
		status, ok := n.Get(v.Key)
		check.That(t, ok && status.Problem != nil && status.Target == v.Target && strings.Contains(status.Problem.Error(), n.recordOf(v)),
			"listed: %v, with %+v", ok, status)
		claimed := map[string]string{"projection": disk + " stays claimed", "claim": "is not known: only a claim that systemd kept"}[known]
		problems := n.Problems()
		check.That(t, len(problems) == 1 && strings.Contains(problems[0].Error(), claimed), "told: %v", problems)
		check.Kind(t, check.Err(n.Defer(t.Context(), n.instruction("pod-2", disk))), volume.InUse)
		check.Kind(t, check.Err(n.Release(t.Context(), v.Target)), volume.Busy)
		n.Close()
	}
	n.startWith(store)
	n.runtime.sandbox = ""
	n.unstage(v.Target)
	wantHeld(t, disk, false)
	check.That(t, len(store.files) == 0, "still kept: %v", store.files)
	n.noLeftovers()
}

// TestLostRecordLeavesADeviceReadOnly: only the record said whether it was so by itself.
func TestLostRecordLeavesADeviceReadOnly(t *testing.T) {
	n := parallelNode(t)
	disk := rig.Disk(t, 16*mib, "")
	set := func(flag int) {
		fd := check.Value(unix.Open(disk, unix.O_RDONLY|unix.O_CLOEXEC, 0))(t)
		check.Must(t, unix.IoctlSetPointerInt(fd, unix.BLKROSET, flag))
		check.Must(t, unix.Close(fd))
	}
	set(1) // as a driver does
	defer set(0)
	in := n.instruction("pod-1", disk, "ro")
	for _, damaged := range []bool{false, true} {
		v := n.stage(in)
		if damaged {
			n.runtime.sandbox = "living"
			n.Close()
			check.Must(t, os.Truncate(n.recordOf(v), 10))
			n.start()
			n.runtime.sandbox = ""
		}
		n.unstage(v.Target)
		wantReadOnly(t, disk, true)
	}
	n.noLeftovers()
}

// TestLostRemovalIsEnded: once begun, a removal is ended whatever became of its record, if the projection names the device.
func TestLostRemovalIsEnded(t *testing.T) {
	n := parallelNode(t)
	disk := rig.Disk(t, 16*mib, "")
	v := n.stage(n.instruction("pod-1", disk))
	n.Close()
	removing := filepath.Join(n.cfg.StateDir, "removing", filepath.Base(n.recordOf(v)))
	check.Must(t, os.Rename(n.recordOf(v), removing))
	check.Must(t, os.Truncate(removing, 10))
	n.start()
	wantHeld(t, disk, false)
	n.noLeftovers()
}
