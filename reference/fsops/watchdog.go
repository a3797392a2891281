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

// The open files of a watchdog.
const (
	rootFD   = 3 + iota // the filesystem's root directory
	placesFD            // the directory of all records
	readyFD             // gets a byte when the watchdog is running
)

// watchdogs is the number of watchdogs of a freeze.
const watchdogs = 2

const startTime = 10 * time.Second

// arm starts the watchdogs of a freeze and waits until they are running.
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

// startWatchdog starts a process that shares only these files with this one.
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
		err = errors.New(err.Error()) // process.ErrEnded would count as the end of the sandbox
	} else if f.ControlGroup != "" {
		_ = cgroup.Move(dog.PID, f.ControlGroup) // where that fails, one watchdog is better than none
	}
	// It ends with its freeze. Reap it if this process is still running then.
	go func() { _ = cmd.Wait() }()
	return dog, err
}

// Watch is the main function of a watchdog: it waits until the time of its freeze is over and thaws the filesystem,
// unless that has been done. It takes the three arguments that Freeze appended to the command line, and the open files.
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
	// Let the OOM killer choose other processes first; this may not be permitted.
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("-999"), 0)
	if _, err := unix.Write(readyFD, []byte{1}); err != nil {
		return fmt.Errorf("tell that the watchdog is there: %w", err)
	}
	_ = unix.Close(readyFD)
	process.CloseInherited(readyFD)
	dog := watchdog{name: args[0], token: args[1]}
	for clock() < deadline {
		select {
		case <-told:
			return dog.finish(false)
		case <-time.After(min(time.Duration(deadline-clock()), time.Second)):
			// In steps: this timer does not run while the machine is suspended.
		}
	}
	return dog.finish(true)
}

type watchdog struct{ name, token string }

const (
	// stuck is how long the record may stay locked after the time. Then the process that has locked it counts as hung.
	stuck = time.Second
	// lastTry is how long a watchdog retries the thaw.
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

// try reports whether nothing is left to do. Without the lock that is so only after a
// thaw that had an effect: a process that hangs may be about to freeze the filesystem.
func (w watchdog) try(late, desperate bool) (done bool, err error) {
	rec, lockErr := lockRecord(placesFD, w.name, 0)
	if errors.Is(lockErr, errLocked) && !desperate {
		return false, lockErr
	}
	mine, other := w.onRecord(late)
	if rec == nil {
		if !mine {
			return true, nil
		}
		was, err := thawFS(rootFD)
		return was || err == nil && !errors.Is(lockErr, errLocked), err
	}
	if !mine {
		rec.removeEmpty()
		rec.close()
		return true, nil
	}
	_, err = thawFS(rootFD)
	if err == nil {
		rec.remove()
	}
	rec.close()
	if err == nil {
		end(other) // it would keep the filesystem busy until the time is over
	}
	return err == nil, err
}

// onRecord reports whether this freeze is the recorded one, and returns its other watchdogs. Without a record it has
// been thawed; at the end of its time it counts as recorded all the same, in case the record was lost.
func (w watchdog) onRecord(late bool) (mine bool, other []process.Process) {
	now, err := readState(placesFD, w.name+"/"+stateFile)
	if err != nil {
		return late, nil
	}
	other = slices.DeleteFunc(now.Watchdogs, func(p process.Process) bool { return p.PID == os.Getpid() })
	return now.Token == w.token, other
}

// endMillis is how long a process may take to end after SIGTERM.
const endMillis = 3000

func end(all []process.Process) {
	var left []int
	for _, p := range all {
		fd, err := unix.PidfdOpen(p.PID, 0)
		if err != nil {
			continue
		}
		// The pidfd refers to the process that has the pid now. If that is p, the pidfd stays p's.
		if !p.Lives() {
			_ = unix.Close(fd)
			continue
		}
		_ = unix.PidfdSendSignal(fd, unix.SIGTERM, nil, 0)
		left = append(left, fd)
	}
	for _, fd := range left {
		if !ended(fd) {
			_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
			_ = ended(fd)
		}
		_ = unix.Close(fd)
	}
}

// ended waits for a process to end, and reports whether it did in time.
func ended(pidfd int) bool {
	for until := clock() + endMillis*1e6; clock() < until; {
		wait := max(1, int((until-clock())/1e6))
		n, _ := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, wait) //nolint:gosec // descriptors are small
		if n > 0 {
			return true
		}
	}
	return false
}
