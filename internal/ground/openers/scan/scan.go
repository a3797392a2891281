// Package scan finds the processes that have a block device, or a disk image, open, by
// reading /proc/PID/fd of all processes. It is the fallback for nodes where the kernel's own
// count of openers cannot be read, and it needs CAP_SYS_PTRACE.
//
// A process counts whatever name it opened the device by, and in whatever mount or PID
// namespace it runs. The scan does not see
//   - what the kernel itself has open (mounts, device mapper: O_EXCL shows those),
//   - a mapping or io_uring file whose descriptor is closed, a descriptor in flight in a socket,
//     or one that moves to another process or number during the scan,
//   - a thread with a descriptor table of its own,
//   - a device node on a disk filesystem that failed or hangs since: device nodes live on
//     devtmpfs or tmpfs, which do not fail,
//   - processes outside of the outermost PID namespace that the node's container runtime is in.
//
// Unknown counts as busy, but only for the files that the unknown descriptor may be: a process
// of one tenant does not stop the volumes of another. See walk.unseen for what decides that.
package scan

import (
	"context"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// File is a block device by its number, or a regular file by its filesystem and
// inode.
type File struct {
	Block        bool
	Major, Minor uint32
	Inode        uint64
}

// Holder is a process that has a file open: a block device in any mode, a regular
// file for writing.
type Holder struct {
	File File
	PID  int
	// Program is the name of the executable file.
	Program string
}

// String names the process for a person.
func (h Holder) String() string { return fmt.Sprintf("process %d (%.40q)", h.PID, h.Program) }

const (
	// scanTime bounds one scan, which takes milliseconds. A caller waits for at most two.
	scanTime = 10 * time.Second
	// hangTime is how long one look at a descriptor may take before the scan goes on without it.
	hangTime = time.Second
	// hangTicks is how often a scan's progress is checked in this time. A machine that was
	// suspended misses checks, so that its scans do not count as hanging.
	hangTicks = 4
	// maxHung bounds the goroutines, and their threads, that hang in the kernel.
	maxHung = 16
	// maxDescriptors bounds the descriptors that are read of one process.
	maxDescriptors = 1 << 20
)

// Scanner reads the descriptors of all processes. Callers that come during a scan share
// the next one, so that any number of them costs at most two scans.
type Scanner struct {
	proc     string
	skip     []int
	sockets  []string
	budget   int
	scanTime time.Duration
	hangTime time.Duration
	statx    statxFunc
	turn     chan struct{} // the right to scan
	sees     atomic.Bool   // a peer has proven that the node's processes can be seen

	mu   sync.Mutex
	next *scan // not begun yet; nil if no caller waits for one
	// hung has the abandoned walks whose look has not returned yet.
	hung map[*walk]position
	// kernel maps the PID of each kernel thread to the inode of its directory. Kernel
	// threads have no descriptors and are half of all processes. Only the running scan
	// replaces it.
	kernel map[string]uint64
}

// New makes a scanner. The sockets are those of kubelet and the container runtime, for Blind.
// It skips this process and process 1: systemd keeps copies of our claims, and is no sandbox.
func New(sockets ...string) *Scanner {
	return &Scanner{
		proc: "/proc", skip: []int{1, os.Getpid()}, sockets: sockets, budget: maxDescriptors,
		scanTime: scanTime, hangTime: hangTime, statx: statx, turn: make(chan struct{}, 1), hung: make(map[*walk]position),
	}
}

// Find lists the processes that have one of the files open, without those of the programs to
// pass over. An error means that no process is known to have one open, but that some process
// could not be examined and may have: it names that process.
func (s *Scanner) Find(ctx context.Context, passOver []string, files ...File) ([]Holder, error) {
	if err := s.Blind(); err != nil {
		return nil, err
	}
	mine := s.join(files)
	defer s.leave(mine)
	select {
	case <-mine.done:
		return mine.answer(passOver, files)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// scan answers all callers that came before it began.
type scan struct {
	want   map[File]bool
	ctx    context.Context // of all its callers: it ends when the last one leaves
	cancel context.CancelFunc
	// callers is how many wait, under the scanner's lock.
	callers int

	done  chan struct{} // closed at the end; the fields below do not change after that
	found []sighting
	err   error // concerns all files
}

// sighting is a holder or, with an error, a process that may be one.
type sighting struct {
	Holder
	err error
}

// join enters the files into the next scan.
func (s *Scanner) join(files []File) *scan {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.next == nil {
		ctx, cancel := context.WithCancel(context.Background())
		s.next = &scan{want: make(map[File]bool), ctx: ctx, cancel: cancel, done: make(chan struct{})}
		go s.run(s.next)
	}
	for _, f := range files {
		s.next.want[f] = true
	}
	s.next.callers++
	return s.next
}

// leave ends a scan that no caller waits for any more.
func (s *Scanner) leave(c *scan) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.callers--; c.callers > 0 {
		return
	}
	c.cancel()
	if s.next == c {
		s.next = nil
	}
}

// run waits for its turn and scans. Callers that come later join the next scan: what was
// read before a call proves nothing to that caller.
func (s *Scanner) run(c *scan) {
	defer close(c.done)
	select {
	case s.turn <- struct{}{}:
		defer func() { <-s.turn }()
	case <-c.ctx.Done():
		return
	}
	s.mu.Lock()
	if s.next == c {
		s.next = nil
	}
	s.mu.Unlock()
	ctx, cancel := context.WithTimeout(c.ctx, s.scanTime)
	defer cancel()
	for again := true; again; {
		again = s.attempt(ctx, c)
	}
}

// attempt walks through /proc once. It reports whether that has to be repeated, because one
// look hung or a look that was believed to hang has returned.
func (s *Scanner) attempt(ctx context.Context, c *scan) (again bool) {
	w, err := s.begin(c.want)
	if err != nil {
		c.err = err
		return false
	}
	ended := s.watch(ctx, w)
	if ctx.Err() != nil {
		c.err = tooSlowError(s.scanTime, w.position())
	}
	if !ended {
		return c.err == nil
	}
	if c.found = w.found; c.err != nil {
		return false
	}
	s.kernel, c.err = w.kernel, w.err
	return s.hasReturned(w.passed)
}

// begin starts a walk, unless too many looks hang.
func (s *Scanner) begin(want map[File]bool) (*walk, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.hung) >= maxHung {
		return nil, hungError(s.hung)
	}
	w := newWalk(s, want)
	go w.all()
	return w, nil
}

// watch waits until a walk ends and reports whether it did. It abandons a walk that makes no
// progress: one system call of it hangs, which nothing can interrupt.
func (s *Scanner) watch(ctx context.Context, w *walk) bool {
	tick := time.NewTicker(s.hangTime / hangTicks)
	defer tick.Stop()
	stopped := ctx.Done()
	before, still := w.position(), 0
	for {
		select {
		case <-w.done:
			return true
		case <-stopped:
			w.stop.Store(true)
			stopped = nil
		case <-tick.C:
			now := w.position()
			if now != before {
				before, still = now, 0
			} else if still++; still == hangTicks {
				return !s.abandon(w, now)
			}
		}
	}
}

// abandon remembers where a walk hangs until it returns. It reports false if it has returned.
func (s *Scanner) abandon(w *walk, at position) bool {
	w.stop.Store(true)
	s.mu.Lock()
	defer s.mu.Unlock()
	if !w.ended {
		s.hung[w] = at
	}
	return !w.ended
}

// hasReturned reports whether one of some abandoned walks has returned. What was passed over
// because of it may be a device on a busy machine, and has to be looked at again.
func (s *Scanner) hasReturned(walks []*walk) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.ContainsFunc(walks, func(w *walk) bool { return w.ended })
}

// answer picks what concerns the files of one caller.
func (c *scan) answer(passOver []string, files []File) (found []Holder, err error) {
	err = c.err
	for _, seen := range c.found {
		switch {
		case !slices.Contains(files, seen.File) || slices.Contains(passOver, seen.Program):
		case seen.err != nil:
			err = seen.err
		default:
			found = append(found, seen.Holder)
		}
	}
	if len(found) > 0 {
		return found, nil
	}
	return nil, err
}
