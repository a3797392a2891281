//go:build system

package fsops_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/fsops"
	"github.com/crust-proxy/crust-proxy/test/harness"
)

// freezeRig is a Freezer with a directory of its own, and a filesystem.
type freezeRig struct {
	*filesystem
	fsops.Freezer
}

func newFreezer(t testing.TB) fsops.Freezer {
	t.Helper()
	self, err := os.Executable()
	must(t, err)
	dir := filepath.Join(harness.Tmpfs(t, "size=1m"), "frozen")
	// The environment of a watchdog is empty: what it is to be stands on its command line.
	return fsops.Freezer{Dir: dir, Watchdog: []string{self, watchdogMode}}
}

func newFreezeRig(t testing.TB, kind string) *freezeRig {
	t.Helper()
	r := &freezeRig{Freezer: newFreezer(t)}
	r.filesystem = newFilesystem(t, kind, size)
	t.Cleanup(func() {
		if dogs := r.watchdogs(); len(dogs) > 0 && r.root >= 0 {
			t.Errorf("watchdogs are left: %v", dogs)
		}
		for _, dog := range r.watchdogs() {
			_ = syscall.Kill(dog, syscall.SIGKILL)
		}
	})
	return r
}

// watchdogs lists the processes of this test's freezes.
func (r *freezeRig) watchdogs() (pids []int) {
	all, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range all {
		raw, err := os.ReadFile(path)
		dir, _ := os.Readlink(filepath.Dir(path) + "/fd/4")
		if err == nil && strings.Contains(string(raw), watchdogMode) && strings.HasPrefix(dir, r.Dir) {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			pids = append(pids, pid)
		}
	}
	return pids
}

// frozen tells whether a write has to wait. It leaves a process that waits.
func (f *filesystem) frozen(within time.Duration) bool {
	f.t.Helper()
	writer := exec.Command("touch", filepath.Join(f.dir, "touched"))
	must(f.t, writer.Start())
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

// wantThawed waits until writes go on.
func (r *freezeRig) wantThawed(within time.Duration) {
	r.t.Helper()
	if r.frozen(within) {
		r.t.Errorf("still frozen after %v", within)
		fd, err := unix.Open(r.dir, unix.O_RDONLY, 0)
		must(r.t, err)
		_, _, _ = unix.Syscall(unix.SYS_IOCTL, uintptr(fd), 0xc0045878, 0)
		_ = unix.Close(fd)
	}
}

// wantNothingLeft wants no watchdog and nothing on record.
func (r *freezeRig) wantNothingLeft() {
	r.t.Helper()
	// With the race detector a process takes a second to end.
	for range 500 {
		left, _ := os.ReadDir(r.Dir)
		if len(left) == 0 && len(r.watchdogs()) == 0 {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	left, _ := os.ReadDir(r.Dir)
	r.t.Errorf("left: %v, watchdogs %v", left, r.watchdogs())
}

func TestFreezeAndThaw(t *testing.T) {
	for _, kind := range filesystems {
		t.Run(kind, func(t *testing.T) {
			r := newFreezeRig(t, kind)
			for range 3 {
				must(t, r.Freeze("key", r.root, time.Minute))
				if len(r.watchdogs()) != 2 {
					t.Errorf("watchdogs: %v", r.watchdogs())
				}
				if !r.frozen(100 * time.Millisecond) {
					t.Error("a write went through")
				}
				if report := r.stat(); report.Abnormal {
					t.Errorf("a frozen filesystem is abnormal: %+v", report)
				}
				if err := r.Freeze("key", r.root, time.Minute); !errors.Is(err, fsops.ErrFrozen) {
					t.Errorf("again: %v", err)
				}
				if err := r.Thaw("other"); !errors.Is(err, fsops.ErrNotFrozen) {
					t.Errorf("thaw by another key: %v", err)
				}
				must(t, r.Thaw("key"))
				r.wantThawed(5 * time.Second)
				r.wantNothingLeft()
				if err := r.Thaw("key"); !errors.Is(err, fsops.ErrNotFrozen) {
					t.Errorf("thawed again: %v", err)
				}
			}
			r.unmount()
			whole(t, kind, r.device)
		})
	}
}

func TestFreezeEndsByItself(t *testing.T) {
	for _, kind := range filesystems {
		r := newFreezeRig(t, kind)
		began := time.Now()
		must(t, r.Freeze("key", r.root, time.Second))
		r.wantThawed(3 * time.Second)
		if took := time.Since(began); took < 900*time.Millisecond {
			t.Errorf("%s: thawed after %v", kind, took)
		}
		r.wantNothingLeft()
		if err := r.Thaw("key"); !errors.Is(err, fsops.ErrNotFrozen) {
			t.Errorf("%s: thaw after the time: %v", kind, err)
		}
	}
}

func TestFreezeRefuses(t *testing.T) {
	r := newFreezeRig(t, "ext4")
	for _, wrong := range []time.Duration{0, -1, fsops.MostFrozen + 1} {
		if err := r.Freeze("key", r.root, wrong); !errors.Is(err, fsops.ErrOutOfRange) {
			t.Errorf("%v: %v", wrong, err)
		}
	}
	tmpfs := openFD(t, harness.Tmpfs(t, "size=1m"), unix.O_PATH)
	if err := r.Freeze("key", tmpfs, time.Minute); !errors.Is(err, fsops.ErrUnsupported) {
		t.Errorf("a tmpfs: %v", err)
	}
	r.wantNothingLeft()
	run(t, "fsfreeze", "--freeze", r.dir)
	if err := r.Freeze("key", r.root, time.Minute); !errors.Is(err, fsops.ErrFrozen) || !strings.Contains(err.Error(), "another program") {
		t.Errorf("frozen by another program: %v", err)
	}
	r.wantNothingLeft()
	if !r.frozen(100 * time.Millisecond) {
		t.Error("what another program has frozen was thawed")
	}
	run(t, "fsfreeze", "--unfreeze", r.dir)
	for what, program := range map[string][]string{"none": nil, "missing": {"/nonexistent"}, "no watchdog": {"/bin/true"}} {
		f := fsops.Freezer{Dir: r.Dir, Watchdog: program}
		if err := f.Freeze("key", r.root, time.Minute); err == nil || !strings.Contains(err.Error(), "watchdog") {
			t.Errorf("%s: %v", what, err)
		}
		if r.frozen(200 * time.Millisecond) {
			t.Errorf("%s: frozen without a watchdog", what)
		}
	}
	r.wantNothingLeft()
}

func TestTwoKeysOfOneFilesystem(t *testing.T) {
	r := newFreezeRig(t, "btrfs")
	run(t, "btrfs", "subvolume", "create", r.dir+"/sub")
	second := mounted(t, "btrfs", r.device, 0, "subvol=sub")
	must(t, r.Freeze("one", r.root, time.Minute))
	if err := r.Freeze("two", second.root, time.Minute); !errors.Is(err, fsops.ErrFrozen) {
		t.Errorf("the second: %v", err)
	}
	if err := r.Thaw("two"); !errors.Is(err, fsops.ErrNotFrozen) {
		t.Errorf("thaw of the second: %v", err)
	}
	if !second.frozen(100 * time.Millisecond) {
		t.Error("not frozen any more")
	}
	must(t, r.Thaw("one"))
	r.wantThawed(5 * time.Second)
	r.wantNothingLeft()
}

// TestKilledWhileFreezing kills the freezer at each place.
func TestKilledWhileFreezing(t *testing.T) {
	for _, kind := range filesystems {
		for place, frozen := range map[string]bool{"freeze-armed": false, "freeze-frozen": true} {
			t.Run(kind+"/"+place, func(t *testing.T) {
				r := newFreezeRig(t, kind)
				r.other("freeze", place, "1s")
				if r.frozen(100*time.Millisecond) != frozen {
					t.Errorf("frozen: %v", !frozen)
				}
				r.wantThawed(3 * time.Second)
				r.wantNothingLeft()
				// Another one need not wait for the end of that.
				r.other("freeze", place, "1m")
				must(t, r.Freeze("key", r.root, time.Minute))
				if !r.frozen(100 * time.Millisecond) {
					t.Error("not frozen after a freezer was killed")
				}
				must(t, r.Thaw("key"))
				r.wantThawed(3 * time.Second)
				r.wantNothingLeft()
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
	if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || !status.Signaled() {
		r.t.Fatalf("%s was not killed at %s: %s", what, place, out)
	}
}

func TestKilledWhileThawing(t *testing.T) {
	r := newFreezeRig(t, "xfs")
	must(t, r.Freeze("key", r.root, time.Minute))
	r.other("thaw", "thaw-thawed", "")
	r.wantThawed(3 * time.Second)
	// Thawed for certain, and said so.
	if err := r.Thaw("key"); !errors.Is(err, fsops.ErrNotFrozen) {
		t.Error(err)
	}
	r.wantNothingLeft()
}

func TestOneWatchdogIsKilled(t *testing.T) {
	for which := range 2 {
		r := newFreezeRig(t, "ext4")
		must(t, r.Freeze("key", r.root, time.Second))
		must(t, syscall.Kill(r.watchdogs()[which], syscall.SIGKILL))
		if !r.frozen(100 * time.Millisecond) {
			t.Error("thawed at once")
		}
		r.wantThawed(3 * time.Second)
		r.wantNothingLeft()

		must(t, r.Freeze("key", r.root, time.Minute))
		must(t, syscall.Kill(r.watchdogs()[which], syscall.SIGKILL))
		must(t, r.Thaw("key"))
		r.wantThawed(3 * time.Second)
		r.wantNothingLeft()
	}
}

func TestFreezerAndOneWatchdogAreKilled(t *testing.T) {
	r := newFreezeRig(t, "xfs")
	r.other("freeze", "freeze-frozen", "1s")
	must(t, syscall.Kill(r.watchdogs()[0], syscall.SIGKILL))
	r.wantThawed(3 * time.Second)
	r.wantNothingLeft()
}

func TestBothWatchdogsAreKilled(t *testing.T) {
	r := newFreezeRig(t, "ext4")
	must(t, r.Freeze("key", r.root, time.Second))
	for _, dog := range r.watchdogs() {
		must(t, syscall.Kill(dog, syscall.SIGKILL))
	}
	time.Sleep(1100 * time.Millisecond)
	if err := r.Thaw("key"); err == nil || !strings.Contains(err.Error(), "fsfreeze") {
		t.Errorf("it does not say how to help: %v", err)
	}
	must(t, r.Freeze("key", r.root, time.Minute))
	must(t, r.Thaw("key"))
	r.wantThawed(3 * time.Second)
	r.wantNothingLeft()
}

func TestWatchdogThatIsToldToEndThaws(t *testing.T) {
	r := newFreezeRig(t, "ext4")
	must(t, r.Freeze("key", r.root, time.Minute))
	must(t, syscall.Kill(r.watchdogs()[0], syscall.SIGTERM))
	r.wantThawed(3 * time.Second)
	r.wantNothingLeft()
	if err := r.Thaw("key"); !errors.Is(err, fsops.ErrNotFrozen) {
		t.Error(err)
	}
}

// TestOldWatchdogLeavesALaterFreezeAlone: one that Thaw could not end.
func TestOldWatchdogLeavesALaterFreezeAlone(t *testing.T) {
	r := newFreezeRig(t, "ext4")
	must(t, r.Freeze("key", r.root, 1500*time.Millisecond))
	old := r.watchdogs()
	// It is out of reach of Thaw: its pid on record is not its own.
	records, err := filepath.Glob(r.Dir + "/*/state.json")
	if err != nil || len(records) != 1 {
		t.Fatal(records, err)
	}
	raw, err := os.ReadFile(records[0])
	must(t, err)
	forged := strings.Replace(string(raw), fmt.Sprintf(`"pid":%d,"start":`, old[0]), fmt.Sprintf(`"pid":%d,"start":1`, old[0]), 1)
	if forged == string(raw) {
		t.Fatalf("the record has no such pid: %s", raw)
	}
	must(t, os.WriteFile(records[0], []byte(forged), 0o600))
	must(t, r.Thaw("key"))
	if left := r.watchdogs(); len(left) != 1 || left[0] != old[0] {
		t.Fatalf("watchdogs %v, of %v", left, old)
	}
	must(t, r.Freeze("key", r.root, time.Minute))
	if !r.frozen(3 * time.Second) {
		t.Error("the watchdog of an earlier freeze has thawed it")
	}
	if left := r.watchdogs(); len(left) != 2 {
		t.Errorf("watchdogs: %v", left)
	}
	must(t, r.Thaw("key"))
	r.wantThawed(3 * time.Second)
	r.wantNothingLeft()
}

func TestRecordIsLost(t *testing.T) {
	for _, lose := range []string{"", "/*", "/*/*"} {
		r := newFreezeRig(t, "ext4")
		must(t, r.Freeze("key", r.root, time.Second))
		paths, err := filepath.Glob(r.Dir + lose)
		must(t, err)
		for _, path := range paths {
			must(t, os.RemoveAll(path))
		}
		r.wantThawed(3 * time.Second)
		r.wantNothingLeft()
	}
}

// TestFreezerThatHangs holds the record for ever.
func TestFreezerThatHangs(t *testing.T) {
	r := newFreezeRig(t, "ext4")
	must(t, r.Freeze("key", r.root, time.Second))
	records, err := filepath.Glob(r.Dir + "/*")
	must(t, err)
	hangs := openFD(t, records[0], unix.O_DIRECTORY)
	must(t, unix.Flock(hangs, unix.LOCK_EX))
	r.wantThawed(5 * time.Second)
	must(t, unix.Flock(hangs, unix.LOCK_UN))
	must(t, r.Freeze("key", r.root, time.Minute))
	must(t, r.Thaw("key"))
	r.wantNothingLeft()
}

// TestSandboxDiesFrozen: the mount goes, and after the thaw the device is free.
func TestSandboxDiesFrozen(t *testing.T) {
	for _, kind := range filesystems {
		for _, byTime := range []bool{false, true} {
			r := newFreezeRig(t, kind)
			device := openFD(t, r.device, unix.O_RDONLY) // keeps the loop device
			must(t, r.Freeze("key", r.root, 1500*time.Millisecond))
			r.unmount()
			if exclusive(r.device) {
				t.Errorf("%s: the frozen filesystem is gone", kind)
			}
			if !byTime {
				must(t, r.Thaw("key"))
			}
			began := time.Now()
			for !exclusive(r.device) && time.Since(began) < 5*time.Second {
				time.Sleep(10 * time.Millisecond)
			}
			if !exclusive(r.device) {
				t.Errorf("%s: the filesystem is busy after the thaw", kind)
			}
			r.wantNothingLeft()
			whole(t, kind, r.device)
			_ = device
		}
	}
}

// exclusive tells whether nobody has a device mounted.
func exclusive(device string) bool {
	fd, err := unix.Open(device, unix.O_RDONLY|unix.O_EXCL|unix.O_CLOEXEC, 0)
	if err == nil {
		_ = unix.Close(fd)
	}
	return err == nil
}

func TestWatchdogsAreIndependent(t *testing.T) {
	r := newFreezeRig(t, "ext4")
	// A descriptor that somebody left open for whatever is started.
	left, err := unix.Open("/dev/zero", unix.O_RDONLY, 0)
	must(t, err)
	defer func() { _ = unix.Close(left) }()
	must(t, r.Freeze("key", r.root, time.Minute))
	defer func() { must(t, r.Thaw("key")) }()
	for _, dog := range r.watchdogs() {
		sid, err := unix.Getsid(dog)
		if err != nil || sid != dog {
			t.Errorf("session %d of %d: %v", sid, dog, err)
		}
		open := slices.DeleteFunc(harness.FDs(t, dog), func(fd string) bool { // those of Go's own
			return strings.Contains(fd, "anon_inode") || strings.HasPrefix(fd, "/sys/fs/cgroup/")
		})
		if want := []string{"/dev/null", "/dev/null", "/dev/null", r.Dir, r.dir}; !slices.Equal(open, want) {
			t.Errorf("open files: %q", open)
		}
		environ, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", dog))
		if err != nil || len(environ) != 0 {
			t.Errorf("environment: %q, %v", environ, err)
		}
	}
}
