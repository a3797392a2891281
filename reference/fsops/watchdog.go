package fsops

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/reference/cgroup"
	"github.com/crust-proxy/crust-proxy/reference/process"
)

// What a watchdog is given as open files.
const (
	rootFD   = 3 + iota // the filesystem's root directory
	placesFD            // the directory of all records
	readyFD             // told by a byte that it is there
)

// watchdogs is how many there are.
const watchdogs = 2

// startTime is how long watchdogs have to be there.
const startTime = 10 * time.Second

// arm starts the watchdogs of a freeze and waits until they are there.
func (f Freezer) arm(root, places *os.File, name string, s *state) (dogs []process.Process, err error) {
	ready, tell, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer func() { _ = ready.Close() }()
	for range watchdogs {
		dog, err := f.startWatchdog([]*os.File{root, places, tell}, name, s)
		if err != nil {
			_ = tell.Close()
			return dogs, fmt.Errorf("start a watchdog, without which nothing is frozen: %w", err)
		}
		dogs = append(dogs, dog)
	}
	_ = tell.Close()
	if err := ready.SetReadDeadline(time.Now().Add(startTime)); err != nil {
		return dogs, err
	}
	for there := 0; there < watchdogs; {
		n, err := ready.Read(make([]byte, watchdogs))
		if err != nil {
			return dogs, fmt.Errorf("%d of %d watchdogs came up, and without them nothing is frozen: %w", there, watchdogs, err)
		}
		there += n
	}
	return dogs, nil
}

// startWatchdog starts a process that shares nothing with this one but the files.
func (f Freezer) startWatchdog(files []*os.File, name string, s *state) (process.Process, error) {
	if len(f.Watchdog) == 0 {
		return process.Process{}, errors.New("no program is configured for it")
	}
	args := slices.Concat(f.Watchdog[1:], []string{name, s.Token, strconv.FormatInt(s.Deadline, 10)})
	cmd := exec.Command(f.Watchdog[0], args...) //nolint:gosec // this very program, by its configuration
	cmd.Dir, cmd.Env, cmd.ExtraFiles = "/", []string{}, files
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return process.Process{}, err
	}
	dog, err := process.Of(cmd.Process.Pid)
	if err != nil {
		_ = cmd.Process.Kill()
	} else if f.ControlGroup != "" {
		_ = cgroup.Move(dog.PID, f.ControlGroup) // where that fails, one watchdog is better than none
	}
	// It ends with its freeze; a process that lives on must not keep it as a zombie.
	go func() { _ = cmd.Wait() }()
	return dog, err
}

// Watch is all that a watchdog does: it waits for the end of its freeze's time and
// thaws the filesystem, unless that has been done. It takes the three arguments that
// Freeze has added to the command line, and the files.
func Watch(args []string) error {
	if len(args) != 3 {
		return fmt.Errorf("a watchdog of a freeze takes 3 arguments and not %d", len(args))
	}
	deadline, err := strconv.ParseInt(args[2], 10, 64)
	if err != nil {
		return fmt.Errorf("the watchdog's time: %w", err)
	}
	told := make(chan os.Signal, 1)
	signal.Notify(told, unix.SIGTERM, unix.SIGINT, unix.SIGHUP)
	// Where memory runs out, others are to go first; that is not always allowed.
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("-999"), 0)
	if _, err := unix.Write(readyFD, []byte{1}); err != nil {
		return fmt.Errorf("tell that the watchdog is there: %w", err)
	}
	_ = unix.Close(readyFD)
	closeInherited()
	dog := watchdog{name: args[0], token: args[1]}
	for clock() < deadline {
		select {
		case <-told:
			return dog.finish(false)
		case <-time.After(min(time.Duration(deadline-clock()), time.Second)):
			// In steps: this timer stands still while the machine sleeps.
		}
	}
	return dog.finish(true)
}

// closeInherited closes what came by accident from whoever started the starter: a pipe
// that somebody reads to its end, say. This program's own files close at exec, and by
// that the others are known.
func closeInherited() {
	dir, err := os.Open("/proc/self/fd")
	if err != nil {
		return
	}
	defer func() { _ = dir.Close() }()
	names, _ := dir.Readdirnames(-1)
	for _, name := range names {
		fd, err := strconv.Atoi(name)
		if err != nil || fd <= readyFD {
			continue
		}
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil && flags&unix.FD_CLOEXEC == 0 {
			_ = unix.Close(fd)
		}
	}
}

// watchdog is one of the watchdogs of a freeze.
type watchdog struct{ name, token string }

const (
	// stuck is how long the record may be locked at the end: then who has it hangs.
	stuck = time.Second
	// lastTry is how long a watchdog tries to thaw.
	lastTry = 10 * time.Minute
)

// finish thaws the filesystem if this freeze is still the one on record.
func (w watchdog) finish(late bool) error {
	began := clock()
	for {
		done, err := w.try(late, clock() > began+stuck.Nanoseconds())
		if done || clock() > began+lastTry.Nanoseconds() {
			return err
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// try tells whether there is nothing left to do. Without the lock only a thaw that
// worked is one: a freeze may be under way in a process that hangs.
func (w watchdog) try(late, desperate bool) (done bool, err error) {
	rec, lockErr := tryRecord(placesFD, w.name)
	if errors.Is(lockErr, errLocked) && !desperate {
		return false, lockErr
	}
	mine, other := w.look(late)
	if rec == nil {
		if !mine {
			return true, nil
		}
		was, err := start(rootFD)
		return was || err == nil && !errors.Is(lockErr, errLocked), err
	}
	if !mine {
		rec.removeEmpty()
		rec.close()
		return true, nil
	}
	_, err = start(rootFD)
	if err == nil {
		rec.remove()
	}
	rec.close()
	if err == nil {
		end(other) // it would hold the filesystem until the time is over
	}
	return err == nil, err
}

// look tells whether this freeze is the one on record, and which the other watchdogs
// are. A freeze that is on record no more was thawed; but at the end of its time it
// is thawed once more, in case that the record was lost.
func (w watchdog) look(late bool) (mine bool, other []process.Process) {
	now, err := readState(placesFD, w.name+"/"+stateFile)
	if err != nil {
		return late, nil
	}
	other = slices.DeleteFunc(now.Watchdogs, func(p process.Process) bool { return p.PID == os.Getpid() })
	return now.Token == w.token, other
}
