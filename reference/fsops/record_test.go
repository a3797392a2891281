package fsops

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/reference/process"
)

func places(t *testing.T) (Freezer, int) {
	t.Helper()
	f := Freezer{Dir: t.TempDir() + "/frozen"}
	dir, err := f.open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = dir.Close() })
	return f, fdOf(dir)
}

func TestRecordIsKeptLockedAndForgotten(t *testing.T) {
	f, at := places(t)
	first, err := lockRecord(at, "device-1-2", time.Second)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := first.read(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a new record: %v", err)
	}
	want := state{Key: "key", Token: "token", Deadline: 5, Frozen: true, Watchdogs: []process.Process{{PID: 1, Start: 2}}}
	if err := errors.Join(first.write(&state{Key: "before"}), first.write(&want)); err != nil {
		t.Fatal(err)
	}
	got, err := first.read()
	if err != nil || got.Key != want.Key || got.Token != want.Token || !got.Frozen || got.Watchdogs[0] != want.Watchdogs[0] {
		t.Errorf("%+v, %v", got, err)
	}
	if _, err := lockRecord(at, "device-1-2", 20*time.Millisecond); !errors.Is(err, errLocked) {
		t.Errorf("a locked record: %v", err)
	}
	// Whoever waits gets a record of that name that is there.
	taken := make(chan *record)
	go func() {
		r, _ := lockRecord(at, "device-1-2", time.Minute)
		taken <- r
	}()
	time.Sleep(20 * time.Millisecond)
	first.remove()
	first.close()
	second := <-taken
	if err := second.write(&want); err != nil {
		t.Fatal(err)
	}
	second.removeEmpty()
	if _, err := second.read(); err != nil {
		t.Errorf("a record that is not empty was removed: %v", err)
	}
	second.remove()
	second.close()
	if left, err := os.ReadDir(f.Dir); err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

func TestThawWithoutAFreeze(t *testing.T) {
	f, _ := places(t)
	if err := f.Thaw("key", -1); !errors.Is(err, ErrNotFrozen) {
		t.Error(err)
	}
}

func TestFreezeOfWhatCannotBeFrozen(t *testing.T) {
	f, at := places(t)
	f.Watchdog = []string{"/nonexistent"}
	if err := f.Freeze("key", at, time.Minute); err == nil || !strings.Contains(err.Error(), "watchdog") {
		t.Error(err)
	}
	if err := f.Freeze("key", at, 0); !errors.Is(err, ErrOutOfRange) {
		t.Error(err)
	}
	if left, err := os.ReadDir(f.Dir); err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

func TestWatchTakesItsArgumentsOnly(t *testing.T) {
	for _, wrong := range [][]string{nil, {"a", "b"}, {"a", "b", "soon"}} {
		if Watch(wrong) == nil {
			t.Errorf("%q is taken", wrong)
		}
	}
}

func TestEndEndsTheRightProcess(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	is, err := process.Of(cmd.Process.Pid)
	if err != nil || !is.Lives() {
		t.Fatal(is, err)
	}
	end([]process.Process{{PID: is.PID, Start: is.Start + 1}})
	if !is.Lives() {
		t.Error("a process of another start was ended")
	}
	end([]process.Process{is, {PID: 1 << 22, Start: 1}})
	if err := cmd.Wait(); err == nil || !strings.Contains(err.Error(), unix.SIGTERM.String()) {
		t.Errorf("it was not told to end: %v", err)
	}
	if is.Lives() {
		t.Error("it is alive after its end")
	}
}
