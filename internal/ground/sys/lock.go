package sys

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Lock takes an exclusive lock on an open file or directory. If another process still has the
// lock after the time most, the error is EWOULDBLOCK.
func Lock(ctx context.Context, fd int, most time.Duration) error {
	for end := time.Now().Add(most); ; {
		err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB)
		if err == nil || !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) || time.Now().After(end) {
			return err
		}
		if !Sleep(ctx, 2*time.Millisecond) {
			return ctx.Err()
		}
	}
}

// LockHolder describes the process that has locked a file, for an error text. It is "" if none can be seen.
func LockHolder(file string) string {
	var st unix.Stat_t
	locks, err := os.ReadFile("/proc/locks")
	if err != nil || unix.Stat(file, &st) != nil {
		return ""
	}
	// The kernel writes: 1: FLOCK ADVISORY WRITE 4711 00:1a:815 0 EOF. One that waits has an arrow before the kind.
	inode := fmt.Sprintf("%02x:%02x:%d", unix.Major(st.Dev), unix.Minor(st.Dev), st.Ino)
	for line := range strings.Lines(string(locks)) {
		if of := strings.Fields(line); len(of) > 5 && of[1] == "FLOCK" && of[5] == inode {
			return processText(of[4])
		}
	}
	return ""
}

func processText(pid string) string {
	name, _ := ReadLine("/proc/" + pid + "/comm")
	text := fmt.Sprintf("process %s (%.40q)", pid, name)
	if groups, err := os.ReadFile("/proc/" + pid + "/cgroup"); err == nil { //nolint:gosec // a pod's has more bytes than ReadLine reads
		group := strings.TrimSpace(string(groups))
		text += fmt.Sprintf(" of the control group %.72q", path.Base(group[strings.LastIndex(group, ":/")+1:]))
	}
	stat, _ := ReadLine("/proc/" + pid + "/stat")
	switch _, state, _ := strings.Cut(stat, ") "); {
	case strings.HasPrefix(state, "Z"):
		text += ", whose threads have not all ended, perhaps because one hangs in the kernel"
	case strings.HasPrefix(state, "D"):
		text += ", which hangs in the kernel"
	}
	return text
}

// Sleep waits for d, or until ctx ends. It reports whether it waited for all of d.
func Sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// KeyLocks is one lock for each key. Callers wait for a lock with a context. The zero value is ready to use.
type KeyLocks[K comparable] struct {
	mu    sync.Mutex
	locks map[K]chan struct{} // those that are held; each is closed when it is released
}

// Lock waits for the key's lock and returns the function that releases it. If the
// context ends first, Lock returns the context's error and leaves nothing behind.
func (l *KeyLocks[K]) Lock(ctx context.Context, key K) (unlock func(), err error) {
	mine := make(chan struct{})
	for {
		l.mu.Lock()
		held := l.locks[key]
		if held == nil {
			if l.locks == nil {
				l.locks = make(map[K]chan struct{})
			}
			l.locks[key] = mine
			l.mu.Unlock()
			return func() { l.mu.Lock(); delete(l.locks, key); l.mu.Unlock(); close(mine) }, nil
		}
		l.mu.Unlock()
		select {
		case <-held:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// TryLock is Lock without waiting. If the lock is taken, free is false and unlock nil.
func (l *KeyLocks[K]) TryLock(key K) (unlock func(), free bool) {
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	unlock, err := l.Lock(ended, key)
	return unlock, err == nil
}

// UntilInterrupted returns a context for a program that removes what it has made: an interrupt, SIGTERM or the end of
// its terminal ends the context. A second interrupt kills the program. A second hangup does not, because both the
// kernel and a shell send one; and with nohup, none ends the context.
func UntilInterrupted() (context.Context, context.CancelFunc) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	if signal.Ignored(syscall.SIGHUP) {
		return ctx, stop
	}
	hung, stopHung := signal.NotifyContext(ctx, syscall.SIGHUP)
	return hung, func() { stopHung(); stop() }
}

// IsClosed reports whether a channel is closed into which nothing is sent.
func IsClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// Wake leaves one message in a channel that has room for one. It never blocks.
func Wake(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default: // it is pending already
	}
}
