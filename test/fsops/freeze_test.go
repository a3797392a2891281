//go:build system

package fsops_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/reference/fsops"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// freezeRig is a Freezer with a directory of its own, and a filesystem.
type freezeRig struct {
	*filesystem
	fsops.Freezer
}

func newFreezer(t testing.TB) fsops.Freezer {
	t.Helper()
	self := check.Value(os.Executable())(t)
	dir := filepath.Join(rig.Tmpfs(t, "size=1m"), "frozen")
	// The environment of a watchdog is empty: what it is to be stands on its command line.
	return fsops.Freezer{Dir: dir, Watchdog: []string{self, watchdogMode}}
}

// parallelFreezeRig is newFreezeRig for a test that runs beside others.
func parallelFreezeRig(t *testing.T, kind string) *freezeRig {
	t.Helper()
	t.Parallel()
	return newFreezeRig(t, kind)
}

func newFreezeRig(t testing.TB, kind string) *freezeRig {
	t.Helper()
	r := &freezeRig{Freezer: newFreezer(t)}
	r.filesystem = newFilesystem(t, kind, size)
	t.Cleanup(func() {
		dogs := r.watchdogs()
		check.That(t, len(dogs) == 0 || r.root < 0, "watchdogs are left: %v", dogs)
		for _, dog := range r.watchdogs() {
			_ = syscall.Kill(dog, syscall.SIGKILL)
		}
	})
	return r
}

// watchdogs lists the processes of this test's freezes.
func (r *freezeRig) watchdogs() []int {
	return rig.Processes(func(proc string) bool {
		raw, err := os.ReadFile(proc + "/cmdline")
		dir, _ := os.Readlink(proc + "/fd/4")
		return err == nil && strings.Contains(string(raw), watchdogMode) && strings.HasPrefix(dir, r.Dir)
	})
}

// frozen tells whether a write has to wait. It leaves a process that waits.
func (f *filesystem) frozen(within time.Duration) bool {
	f.t.Helper()
	writer := exec.Command("touch", filepath.Join(f.dir, "touched"))
	check.Must(f.t, writer.Start())
	done := make(chan struct{})
	go func() { _ = writer.Wait(); close(done) }()
	f.t.Cleanup(func() { <-done })
	select {
	case <-done:
		return false
	case <-time.After(within):
		return true
	}
}

// soonFor is how long something may take that happens soon, on a busy machine. It is less
// than the minute for which tests freeze what nothing but a thaw is to end.
const soonFor = 40 * time.Second

// brief is how long tests freeze what is to be thawed by time. It leaves a busy machine the time to look at it before.
const brief = 10 * time.Second

// wantThawed waits until writes go on.
func (r *freezeRig) wantThawed() {
	r.t.Helper()
	if r.frozen(soonFor) {
		r.t.Errorf("still frozen after %v", soonFor)
		fd := check.Value(unix.Open(r.dir, unix.O_RDONLY, 0))(r.t)
		_, _, _ = unix.Syscall(unix.SYS_IOCTL, uintptr(fd), 0xc0045878, 0)
		_ = unix.Close(fd)
	}
}

// wantFrozen wants a write to wait.
func (f *filesystem) wantFrozen() {
	f.t.Helper()
	check.That(f.t, f.frozen(100*time.Millisecond), "it is not frozen")
}

// wantNotFrozen wants a thaw by a key to say that nothing is frozen.
func (r *freezeRig) wantNotFrozen(key string, root int) {
	r.t.Helper()
	err := r.Thaw(key, root)
	check.That(r.t, errors.Is(err, fsops.ErrNotFrozen), "thaw by %s: %v", key, err)
}

// thaw ends a freeze, of which nothing is left then.
func (r *freezeRig) thaw(root int) {
	r.t.Helper()
	check.Must(r.t, r.Thaw("key", root))
	r.wantOver()
}

// wantOver waits until writes go on, and nothing is left.
func (r *freezeRig) wantOver() {
	r.t.Helper()
	r.wantThawed()
	r.wantNothingLeft()
}

// wantNothingLeft wants no watchdog and nothing on record.
func (r *freezeRig) wantNothingLeft() {
	r.t.Helper()
	err := check.Until(soonFor, 10*time.Millisecond, func() error {
		left, _ := os.ReadDir(r.Dir) // it may not be there
		if dogs := r.watchdogs(); len(left) > 0 || len(dogs) > 0 {
			return fmt.Errorf("left: %v, watchdogs %v", left, dogs)
		}
		return nil
	})
	check.That(r.t, err == nil, "%v", err)
}

func TestFreezeAndThaw(t *testing.T) {
	t.Parallel()
	for _, kind := range filesystems {
		t.Run(kind, func(t *testing.T) {
			r := newFreezeRig(t, kind)
			for range 3 {
				check.Must(t, r.Freeze("key", r.root, time.Minute))
				check.That(t, len(r.watchdogs()) == 2, "watchdogs: %v", r.watchdogs())
				r.wantFrozen()
				report := r.stat().Condition
				check.That(t, !report.Abnormal, "a frozen filesystem is abnormal: %+v", report)
				check.Is(t, r.Freeze("key", r.root, time.Minute), fsops.ErrFrozen) // again
				r.wantNotFrozen("other", -1)
				r.thaw(-1)
				r.wantNotFrozen("key", -1)
			}
			r.unmount()
			whole(t, kind, r.device)
		})
	}
}

func TestFreezeEndsByItself(t *testing.T) {
	t.Parallel()
	for _, kind := range filesystems {
		r := newFreezeRig(t, kind)
		began := time.Now()
		check.Must(t, r.Freeze("key", r.root, brief))
		r.wantThawed()
		took := time.Since(began)
		check.That(t, took >= brief-100*time.Millisecond, "%s: thawed after %v", kind, took)
		r.wantNothingLeft()
		r.wantNotFrozen("key", -1)
	}
}

func TestFreezeRefuses(t *testing.T) {
	r := parallelFreezeRig(t, "ext4")
	for _, wrong := range []time.Duration{0, -1, fsops.MostFrozen + 1} {
		err := r.Freeze("key", r.root, wrong)
		check.That(t, errors.Is(err, fsops.ErrOutOfRange), "%v: %v", wrong, err)
	}
	tmpfs := openFD(t, rig.Tmpfs(t, "size=1m"), unix.O_PATH)
	check.Is(t, r.Freeze("key", tmpfs, time.Minute), fsops.ErrUnsupported) // a tmpfs
	r.wantNothingLeft()
	rig.Command(t, "fsfreeze", "--freeze", r.dir)
	err := r.Freeze("key", r.root, time.Minute)
	check.That(t, errors.Is(err, fsops.ErrFrozen) && strings.Contains(err.Error(), "another program"), "frozen by another program: %v", err)
	r.wantNothingLeft()
	r.wantFrozen()
	rig.Command(t, "fsfreeze", "--unfreeze", r.dir)
	for what, program := range map[string][]string{"none": nil, "missing": {"/nonexistent"}, "no watchdog": {"/bin/true"}} {
		f := fsops.Freezer{Dir: r.Dir, Watchdog: program}
		check.That(t, strings.Contains(fmt.Sprint(f.Freeze("key", r.root, time.Minute)), "watchdog"), "%s: its error names no watchdog", what)
		check.That(t, !r.frozen(soonFor), "%s: frozen without a watchdog", what)
	}
	r.wantNothingLeft()
}

// TestThawedBySomebodyElse: it can be frozen again at once, although a freeze of it is on record.
func TestThawedBySomebodyElse(t *testing.T) {
	r := newFreezeRig(t, "xfs")
	check.Must(t, r.Freeze("key", r.root, time.Minute))
	rig.Command(t, "fsfreeze", "--unfreeze", r.dir)
	check.Must(t, r.Freeze("key", r.root, time.Minute))
	r.wantFrozen()
	r.thaw(r.root)
}

func TestTwoKeysOfOneFilesystem(t *testing.T) {
	r := parallelFreezeRig(t, "btrfs")
	rig.Command(t, "btrfs", "subvolume", "create", r.dir+"/sub")
	second := mounted(t, "btrfs", r.device, 0, "subvol=sub")
	check.Must(t, r.Freeze("one", r.root, time.Minute))
	check.Is(t, r.Freeze("two", second.root, time.Minute), fsops.ErrFrozen) // the second
	r.wantNotFrozen("two", second.root)
	second.wantFrozen()
	check.Must(t, r.Thaw("one", -1))
	r.wantOver()
}

// TestKilledWhileFreezing kills the freezer at each place.
func TestKilledWhileFreezing(t *testing.T) {
	t.Parallel()
	for _, kind := range filesystems {
		for place, frozen := range map[string]bool{"freeze-armed": false, "freeze-frozen": true} {
			t.Run(kind+"/"+place, func(t *testing.T) {
				r := parallelFreezeRig(t, kind)
				r.other("freeze", place, "1s")
				r.wantOver()
				before := written(t, r.device)
				check.Must(t, os.WriteFile(filepath.Join(r.dir, "dirty"), make([]byte, 4<<20), 0o600))
				r.other("freeze", place, "1m")
				// What is dirty is written before writes stop, and not while they wait.
				got := written(t, r.device) - before
				check.That(t, got >= 4<<20/512, "%d sectors are written", got)
				map[bool]func(){false: r.wantThawed, true: r.wantFrozen}[frozen]()
				// Another one need not wait for the end of that.
				check.Must(t, r.Freeze("key", r.root, time.Minute))
				r.wantFrozen()
				r.thaw(-1)
			})
		}
	}
}

// other freezes or thaws in a process that is killed at a place.
func (r *freezeRig) other(what, place, timeout string) {
	r.t.Helper()
	cmd := exec.Command(r.Watchdog[0], r.Dir, r.dir, timeout)
	cmd.Env = append(os.Environ(), asOther+"="+what, "CRUST_FAILPOINTS="+place+"=kill")
	out, _ := cmd.CombinedOutput()
	status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus)
	check.Require(r.t, ok && status.Signaled(), "%s was not killed at %s: %s", what, place, out)
}

func TestKilledWhileThawing(t *testing.T) {
	r := parallelFreezeRig(t, "xfs")
	check.Must(t, r.Freeze("key", r.root, time.Minute))
	r.other("thaw", "thaw-thawed", "")
	r.wantThawed()
	// Thawed for certain, and said so.
	r.wantNotFrozen("key", -1)
	r.wantNothingLeft()
}

func TestOneWatchdogIsKilled(t *testing.T) {
	t.Parallel()
	for which := range 2 {
		r := newFreezeRig(t, "ext4")
		check.Must(t, r.Freeze("key", r.root, brief))
		check.Must(t, syscall.Kill(r.watchdogs()[which], syscall.SIGKILL))
		r.wantFrozen()
		r.wantOver()

		check.Must(t, r.Freeze("key", r.root, time.Minute))
		check.Must(t, syscall.Kill(r.watchdogs()[which], syscall.SIGKILL))
		r.thaw(-1)
	}
}

// forgotten freezes the filesystem, and kills everybody who would thaw it.
func (r *freezeRig) forgotten(timeout time.Duration) {
	r.t.Helper()
	check.Must(r.t, r.Freeze("key", r.root, timeout))
	check.That(r.t, !r.Forgotten("key"), "forgotten while its watchdogs live")
	for _, dog := range r.watchdogs() {
		check.Must(r.t, syscall.Kill(dog, syscall.SIGKILL))
	}
	// Each is there until this process has waited for it.
	check.Eventually(r.t, "it is known as forgotten", func() bool { return r.Forgotten("key") })
}

// TestBothWatchdogsAreKilled: the filesystem is found by whoever has it, and without
// that by whatever process has it mounted.
func TestBothWatchdogsAreKilled(t *testing.T) {
	t.Parallel()
	for _, kind := range filesystems {
		r := newFreezeRig(t, kind)
		for what, root := range map[string]int{"by its root": r.root, "by a mount": -1} {
			r.forgotten(time.Minute)
			r.wantNotFrozen("other", -1)
			check.NoError(t, r.Thaw("key", root), "%s: %s", kind, what)
			r.wantOver()
		}
		check.That(t, !r.Forgotten("key"), "%s: forgotten after it was thawed", kind)
		// Freezing it again is possible when the time is over, and thaws it before.
		r.forgotten(brief)
		time.Sleep(brief + 100*time.Millisecond)
		check.Must(t, r.Freeze("key", r.root, time.Minute))
		r.thaw(-1)
	}
}

// TestThawWithoutARecord: the kernel says whether it is frozen. That nobody knows for how long is an error.
func TestThawWithoutARecord(t *testing.T) {
	r := parallelFreezeRig(t, "xfs")
	r.forgotten(time.Minute)
	check.Must(t, os.RemoveAll(r.Dir))
	err := r.Thaw("key", r.root)
	check.That(t, errors.Is(err, fsops.ErrNotFrozen) && strings.Contains(err.Error(), "has been thawed now"), "thaw without a record: %v", err)
	r.wantThawed()
	err = r.Thaw("key", r.root)
	check.That(t, errors.Is(err, fsops.ErrNotFrozen) && !strings.Contains(err.Error(), "has been thawed now"), "thaw of what is not frozen: %v", err)
	r.wantNothingLeft()
}

// TestExpiredFreezeIsThawed: what nobody thaws in time, ThawExpired does, and nothing else.
func TestExpiredFreezeIsThawed(t *testing.T) {
	r := parallelFreezeRig(t, "ext4")
	expired := func() ([]string, time.Duration) {
		t.Helper()
		keys, next, err := r.ThawExpired()
		check.Must(t, err)
		return keys, next
	}
	keys, next := expired()
	check.That(t, len(keys) == 0 && next == 0, "nothing was frozen: %v, %v", keys, next)
	check.Must(t, r.Freeze("key", r.root, time.Minute))
	keys, next = expired()
	check.That(t, len(keys) == 0 && next >= time.Second && r.frozen(100*time.Millisecond), "within its time: %v, %v", keys, next)
	check.Must(t, r.Thaw("key", -1))
	r.wantThawed()

	r.forgotten(brief)
	keys, next = expired()
	for deadline := time.Now().Add(time.Minute); len(keys) == 0 && next > 0 && time.Now().Before(deadline); keys, next = expired() {
		time.Sleep(next)
	}
	check.That(t, slices.Equal(keys, []string{"key"}) && next == 0, "thawed %v, next in %v", keys, next)
	r.wantOver()
}

// TestNewFreezeIsNotExpired: a filesystem that is frozen anew while ThawExpired waits for its record stays frozen.
func TestNewFreezeIsNotExpired(t *testing.T) {
	r := parallelFreezeRig(t, "ext4")
	r.forgotten(brief)
	record := r.onRecord()
	freezer := openFD(t, filepath.Dir(record), unix.O_DIRECTORY)
	check.Must(t, unix.Flock(freezer, unix.LOCK_EX))
	_, next, err := r.ThawExpired()
	check.Must(t, err)
	time.Sleep(next)
	thawed := make(chan []string)
	go func() {
		keys, _, err := r.ThawExpired()
		check.That(t, err == nil, "%v", err)
		thawed <- keys
	}()
	time.Sleep(time.Second)
	raw := check.Value(os.ReadFile(record))(t)
	anew := regexp.MustCompile(`"token":"\w+","deadline":\d+`).ReplaceAll(raw, fmt.Appendf(nil, `"token":"new","deadline":%d`, int64(1)<<62))
	check.Must(t, os.WriteFile(record, anew, 0o600))
	check.Must(t, unix.Flock(freezer, unix.LOCK_UN))
	keys := <-thawed
	check.That(t, len(keys) == 0 && r.frozen(100*time.Millisecond), "the new freeze was thawed: %q", keys)
	r.thaw(r.root)
}

// onRecord is the file of the only freeze on record.
func (r *freezeRig) onRecord() string {
	r.t.Helper()
	records, err := filepath.Glob(r.Dir + "/*/state.json")
	check.Require(r.t, err == nil && len(records) == 1, "%v, %v", records, err)
	return records[0]
}

// TestRecordThatCannotBeRead: what may be frozen is asked for again.
func TestRecordThatCannotBeRead(t *testing.T) {
	r := parallelFreezeRig(t, "ext4")
	r.forgotten(time.Minute)
	record := r.onRecord()
	check.Must(t, os.Rename(record, record+"x"))
	check.Must(t, os.Symlink(record+"x", record)) // which is not followed
	keys, next, err := r.ThawExpired()
	check.That(t, err != nil && len(keys) == 0 && next > 0, "a record that cannot be read: thawed %q, next in %v: %v", keys, next, err)
	check.Must(t, os.Rename(record+"x", record))
	r.thaw(-1)
}

// TestTwoFilesystemsOfOneKey: a volume can have got another device while the filesystem on the one before was frozen.
func TestTwoFilesystemsOfOneKey(t *testing.T) {
	one := parallelFreezeRig(t, "ext4")
	other := &freezeRig{Freezer: one.Freezer, filesystem: newFilesystem(t, "ext4", size)}
	for _, order := range [][]*freezeRig{{one, other}, {other, one}} {
		for _, r := range order {
			check.Must(t, r.Freeze("key", r.root, time.Minute))
		}
		check.Must(t, order[0].Thaw("key", order[0].root))
		order[0].wantThawed()
		check.That(t, order[1].frozen(100*time.Millisecond), "another filesystem was thawed")
		check.Must(t, order[1].Thaw("key", -1))
		order[1].wantThawed()
	}
	one.wantNothingLeft()
}

// TestFrozenNoMore: a record that was left over touches no other filesystem that has the device by now, mounted or not.
func TestFrozenNoMore(t *testing.T) {
	r := parallelFreezeRig(t, "ext4")
	r.forgotten(time.Minute)
	rig.Command(t, "fsfreeze", "--unfreeze", r.dir)
	r.unmount()
	wantFree(t, r.device)
	for _, kind := range []string{"ext4", "xfs"} { // used by somebody who has it open, as a VM does
		rig.Mkfs(t, kind, r.device, map[string]string{"ext4": "-F", "xfs": "-f"}[kind])
		held := check.Value(unix.Open(r.device, unix.O_RDONLY|unix.O_EXCL|unix.O_CLOEXEC, 0))(t)
		before := written(t, r.device)
		check.That(t, r.Thaw("key", -1) != nil, "thawed what is not frozen")
		after := written(t, r.device)
		check.That(t, after == before, "%d sectors were written to the %s of somebody else, and before %d", after, kind, before)
		check.Must(t, unix.Close(held))
	}
	r.wantNotFrozen("key", -1)
	r.wantNothingLeft()
}

// written is how many sectors were ever written to a device.
func written(t *testing.T, device string) int {
	t.Helper()
	raw := check.Value(os.ReadFile("/sys/block/" + filepath.Base(device) + "/stat"))(t)
	return check.Value(strconv.Atoi(strings.Fields(string(raw))[6]))(t)
}

// TestFreezeOutlivesItsControlGroup: everything in the control group in which the
// freeze began is killed, as a pod's is.
func TestFreezeOutlivesItsControlGroup(t *testing.T) {
	r := parallelFreezeRig(t, "ext4")
	pod, own := rig.ControlGroups(t, "pod"), rig.ControlGroups(t, "own")
	// The program is there from the beginning, as what a shim starts is.
	enter := "for group in " + strings.Join(pod, " ") + `; do echo $$ >"$group/cgroup.procs" || exit; done; exec "$@"`
	freeze := exec.Command("sh", "-c", enter, "sh", r.Watchdog[0], r.Dir, r.dir, "1m", filepath.Base(own[0]))
	freeze.Env = append(os.Environ(), asOther+"=freeze")
	check.Run(t, freeze)
	for _, group := range pod {
		for _, pid := range rig.InGroup(t, group) {
			t.Errorf("process %s is still in %s", pid, group)
			killed, _ := strconv.Atoi(pid)
			check.Must(t, syscall.Kill(killed, syscall.SIGKILL))
		}
	}
	check.That(t, len(r.watchdogs()) == 2 && r.frozen(100*time.Millisecond), "the watchdogs are %v", r.watchdogs())
	r.thaw(-1)
}

func TestWatchdogThatIsToldToEndThaws(t *testing.T) {
	r := parallelFreezeRig(t, "ext4")
	check.Must(t, r.Freeze("key", r.root, time.Minute))
	check.Must(t, syscall.Kill(r.watchdogs()[0], syscall.SIGTERM))
	r.wantOver()
	r.wantNotFrozen("key", -1)
}

// TestOldWatchdogLeavesALaterFreezeAlone: one that Thaw could not end.
func TestOldWatchdogLeavesALaterFreezeAlone(t *testing.T) {
	r := parallelFreezeRig(t, "ext4")
	check.Must(t, r.Freeze("key", r.root, brief))
	old := r.watchdogs()
	// It is out of reach of Thaw: its pid on record is not its own.
	record := r.onRecord()
	raw := check.Value(os.ReadFile(record))(t)
	forged := strings.Replace(string(raw), fmt.Sprintf(`"pid":%d,"start":`, old[0]), fmt.Sprintf(`"pid":%d,"start":1`, old[0]), 1)
	check.Require(t, forged != string(raw), "the record has no such pid: %s", raw)
	check.Must(t, os.WriteFile(record, []byte(forged), 0o600))
	check.Must(t, r.Thaw("key", -1))
	left := r.watchdogs()
	check.Require(t, len(left) == 1 && left[0] == old[0], "watchdogs %v, of %v", left, old)
	check.Must(t, r.Freeze("key", r.root, time.Minute))
	check.That(t, r.frozen(brief+time.Second), "the watchdog of an earlier freeze has thawed it")
	left = r.watchdogs()
	check.That(t, len(left) == 2, "watchdogs: %v", left)
	r.thaw(-1)
}

func TestRecordIsLost(t *testing.T) {
	t.Parallel()
	for _, lose := range []string{"", "/*", "/*/*"} {
		r := newFreezeRig(t, "ext4")
		check.Must(t, r.Freeze("key", r.root, brief))
		paths := check.Value(filepath.Glob(r.Dir + lose))(t)
		for _, path := range paths {
			check.Must(t, os.RemoveAll(path))
		}
		r.wantOver()
	}
}

// TestFreezerThatHangs holds the record for ever.
func TestFreezerThatHangs(t *testing.T) {
	r := parallelFreezeRig(t, "ext4")
	check.Must(t, r.Freeze("key", r.root, brief))
	hangs := openFD(t, filepath.Dir(r.onRecord()), unix.O_DIRECTORY)
	check.Must(t, unix.Flock(hangs, unix.LOCK_EX))
	r.wantThawed()
	check.Must(t, unix.Flock(hangs, unix.LOCK_UN))
	check.Must(t, r.Freeze("key", r.root, time.Minute))
	check.Must(t, r.Thaw("key", -1))
	r.wantNothingLeft()
}

// TestSandboxDiesFrozen: the kernel keeps a frozen filesystem, and its device, when the last mount has gone. After the
// thaw the device is free.
func TestSandboxDiesFrozen(t *testing.T) {
	t.Parallel()
	for _, kind := range filesystems {
		for _, end := range []string{"by time", "by a thaw", "without watchdogs"} {
			r := newFreezeRig(t, kind)
			if end == "without watchdogs" {
				r.forgotten(time.Minute)
			} else {
				check.Must(t, r.Freeze("key", r.root, map[string]time.Duration{"by time": brief, "by a thaw": time.Minute}[end]))
			}
			r.unmount()
			check.Require(t, rig.Exclusive(r.device) != nil, "%s: the frozen filesystem is gone", kind)
			if end != "by time" {
				check.NoError(t, r.Thaw("key", -1), "%s, %s", kind, end)
			}
			wantFree(t, r.device)
			r.wantNothingLeft()
			whole(t, kind, r.device)
		}
	}
}

// wantFree waits until nobody has a device mounted. A mount namespace that was made before
// the unmount has a copy of the mount for a moment.
func wantFree(t testing.TB, device string) {
	t.Helper()
	check.Eventually(t, "nobody has "+device+" mounted", func() bool { return rig.Exclusive(device) == nil })
}

func TestWatchdogsAreIndependent(t *testing.T) {
	r := parallelFreezeRig(t, "ext4")
	// A descriptor that somebody left open for whatever is started.
	left := check.Value(unix.Open("/dev/zero", unix.O_RDONLY, 0))(t)
	defer func() { _ = unix.Close(left) }()
	check.Must(t, r.Freeze("key", r.root, time.Minute))
	defer func() { check.Must(t, r.Thaw("key", -1)) }()
	for _, dog := range r.watchdogs() {
		sid, err := unix.Getsid(dog)
		check.That(t, err == nil && sid == dog, "session %d of %d: %v", sid, dog, err)
		want := []string{"/dev/null", "/dev/null", "/dev/null", r.Dir, r.dir}
		check.Succeeds(t, "it closes what is not its own", func() error { // which it does when it has said that it is there
			open := slices.DeleteFunc(rig.FDs(t, dog), func(fd string) bool { // those of Go's own
				return strings.Contains(fd, "anon_inode") || strings.HasPrefix(fd, "/sys/fs/cgroup/")
			})
			if !slices.Equal(open, want) {
				return fmt.Errorf("open files: %q", open)
			}
			return nil
		})
		environ, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", dog))
		check.That(t, err == nil && len(environ) == 0, "environment: %q, %v", environ, err)
	}
}
