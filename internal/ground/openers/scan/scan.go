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
//     devtmpfs or tmpfs, which do not fail.
//
// Unknown counts as busy, but only for the files that the unknown descriptor may be: a process
// of one tenant does not stop the volumes of another. See table.unseen for what decides that.
package scan

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"
)

// File is a block device by its number, or a regular file by its filesystem and inode.
type File struct {
	Block        bool
	Major, Minor uint32
	Inode        uint64
}

// String names a file for a person.
func (f File) String() string {
	if f.Block {
		return fmt.Sprintf("the device %d:%d", f.Major, f.Minor)
	}
	return fmt.Sprintf("the image %d:%d inode %d", f.Major, f.Minor, f.Inode)
}

// Holder is a process that has a file open: a block device in any mode, a regular file for writing.
type Holder struct {
	PID int
	// Program is the name of its executable file.
	Program string
	// Group is the last part of its control group's path, which names its container or unit. The scan does not read it.
	Group string
}

// String names the process for a person.
func (h Holder) String() string {
	text := fmt.Sprintf("process %d (%.40q)", h.PID, h.Program)
	if h.Group != "" && h.Group != "/" {
		text += fmt.Sprintf(" of the control group %.72q", h.Group)
	}
	return text
}

const (
	// scanTime bounds one scan, which takes milliseconds. A caller waits for at most two.
	scanTime = 10 * time.Second
	// hangTime is how long one look at a descriptor may take before the scan goes on without it.
	hangTime = time.Second
	// maxHung bounds the goroutines, and their threads, that hang in the kernel.
	maxHung = 16
)

// Scanner reads the descriptors of all processes. Callers that come during a scan share
// the next one, so that any number of them costs at most two scans.
type Scanner struct {
	proc     string
	skip     []int
	scanTime time.Duration
	hangTime time.Duration
	statx    statxFunc
	turn     sync.Mutex // the right to scan

	mu   sync.Mutex
	next *scan // not begun yet; nil if no caller waits for one
	// hung has the places where a look hangs, with their mounts, until it returns.
	hung map[place]int
}

// New makes a scanner. It skips this process and process 1: systemd keeps copies of our claims, and is no sandbox.
func New() *Scanner {
	return &Scanner{
		proc: "/proc", skip: []int{1, os.Getpid()},
		scanTime: scanTime, hangTime: hangTime, statx: statx, hung: make(map[place]int),
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
	select {
	case <-mine.done:
		return mine.answer(passOver, files)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// join enters the files into the next scan. What was read before a call proves nothing to its caller.
func (s *Scanner) join(files []File) *scan {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.next
	if c == nil {
		c = &scan{s: s, want: make(map[File]bool), done: make(chan struct{})}
		s.next = c
		go func() {
			defer close(c.done)
			s.turn.Lock()
			defer s.turn.Unlock()
			s.mu.Lock()
			s.next = nil
			s.mu.Unlock()
			c.run()
		}()
	}
	for _, f := range files {
		c.want[f] = true
	}
	return c
}

// answer picks what concerns the files of one caller.
func (c *scan) answer(passOver []string, files []File) (found []Holder, err error) {
	err = c.err
	for _, seen := range c.found {
		switch {
		case !slices.Contains(files, seen.file) || slices.Contains(passOver, seen.Program):
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

// InitialPIDs is the machine's own PID namespace, as the kernel's <linux/proc_ns.h> numbers it.
const InitialPIDs = "pid:[4026531836]"

// Blind returns why this process does not see the other processes of the node, or nil: a
// container sees only its own, unless it has the node's PID namespace.
func (s *Scanner) Blind() error {
	if _, err := os.Stat(s.proc + "/1"); err != nil {
		return fmt.Errorf("the processes of this node cannot be seen (is /proc mounted with hidepid?): %w", err)
	}
	ns, err := os.Readlink(s.proc + "/self/ns/pid")
	if err == nil && ns != InitialPIDs {
		err = errors.New("only the processes of crust-proxy's own container can be seen: its pod needs hostPID: true (on a node that is " +
			"itself a container nothing can be seen)")
	}
	return err
}
