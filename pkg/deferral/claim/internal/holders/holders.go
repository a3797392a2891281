// Package holders finds the processes that have a block device, or a disk image,
// open. It asks the kernel and nobody else: a sandbox whose shim died, or that no
// container runtime lists any more, may live on with the disk and write to it.
//
// A process counts whatever name it opened the device by, and in whatever mount or PID
// namespace it runs. The scan does not see what the kernel itself has open (mounts, device
// mapper: O_EXCL shows those), a descriptor of a thread with a descriptor table of its own, one
// that is passed on during the scan, or a mapping or io_uring file whose descriptor is closed.
// No VMM is known to have a volume's device in one of these ways alone.
package holders

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/pace"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
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

// scanTime bounds the wait for one scan, which takes milliseconds.
const scanTime = 10 * time.Second

// Scanner reads the descriptors of all processes. Callers that come during a scan share
// the next one, so that any number of them costs at most two scans.
type Scanner struct {
	proc string
	skip []int
	turn chan struct{} // the right to scan

	mu   sync.Mutex
	next *scan // not begun yet; nil if no caller waits for one
	// kernel maps the PID of each kernel thread to the inode of its directory. Kernel
	// threads have no descriptors and are half of all processes. Only the running scan
	// uses it.
	kernel map[string]uint64
}

// New makes a scanner. It skips this process and process 1: systemd keeps copies of our
// claims, and is no sandbox.
func New() *Scanner {
	return &Scanner{proc: "/proc", skip: []int{1, os.Getpid()}, turn: make(chan struct{}, 1)}
}

// Find lists the processes that have one of the files open, without those of the programs to
// pass over. An error means that the answer is not known: some process could not be examined,
// and no other one has a file open.
func (s *Scanner) Find(ctx context.Context, passOver []string, files ...File) ([]Holder, error) {
	if err := s.Blind(); err != nil {
		return nil, err
	}
	mine := s.join(files)
	bound := time.NewTimer(scanTime)
	defer bound.Stop()
	select {
	case <-mine.done:
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-bound.C:
		return nil, fmt.Errorf("the descriptors of all processes could not be read within %s", scanTime)
	}
	found := slices.DeleteFunc(slices.Clone(mine.found), func(h Holder) bool { return !slices.Contains(files, h.File) })
	found = slices.DeleteFunc(found, func(h Holder) bool { return slices.Contains(passOver, h.Program) })
	if len(found) > 0 {
		return found, nil
	}
	return nil, mine.err
}

// join enters the files into the next scan.
func (s *Scanner) join(files []File) *scan {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.next == nil {
		s.next = &scan{scanner: s, want: make(map[File]bool), done: make(chan struct{})}
		go s.run(s.next)
	}
	for _, f := range files {
		s.next.want[f] = true
	}
	return s.next
}

// run waits for its turn and scans. Callers that come later join the next scan: what was
// read before a call proves nothing to that caller.
func (s *Scanner) run(mine *scan) {
	s.turn <- struct{}{}
	defer func() { <-s.turn }()
	s.mu.Lock()
	s.next = nil
	s.mu.Unlock()
	defer close(mine.done)
	mine.all()
}

// initialPIDs is the machine's own PID namespace, as the kernel's <linux/proc_ns.h>
// numbers it.
const initialPIDs = "pid:[4026531836]"

// Blind returns why this process does not see the other processes of the node, or nil: a
// container sees only its own, unless it has the node's PID namespace.
func (s *Scanner) Blind() error {
	if _, err := os.Stat(s.proc + "/1"); err != nil {
		return fmt.Errorf("the processes of this node cannot be seen (is /proc mounted with hidepid?): %w", err)
	}
	if ns, err := os.Readlink(s.proc + "/self/ns/pid"); err != nil || ns == initialPIDs {
		return err
	}
	if first, err := os.ReadFile(s.proc + "/1/comm"); os.Getpid() == 1 || err == nil && string(first) == "pause\n" {
		return errors.New("only the processes of crust-proxy's own container can be seen: " + volume.TextNeedsHost)
	}
	return nil
}

// scan is one walk through /proc.
type scan struct {
	scanner *Scanner
	want    map[File]bool
	loop    pace.Loop
	done    chan struct{} // closed at the end; the fields below do not change after that
	found   []Holder
	err     error
}

func (c *scan) all() {
	before := c.scanner.kernel
	c.scanner.kernel = make(map[string]uint64, len(before))
	err := eachEntry(c.scanner.proc, func(_ int, pid string, inode uint64) {
		if number, err := strconv.Atoi(pid); err != nil || slices.Contains(c.scanner.skip, number) {
			return
		}
		if before[pid] == inode {
			c.scanner.kernel[pid] = inode
			return
		}
		c.process(pid, inode)
	})
	if err != nil {
		c.unknown(err)
	}
}

// process examines one process. If its first thread has ended, the process's own directory
// shows no descriptors, but its other threads may have some.
func (c *scan) process(pid string, inode uint64) {
	c.loop.Yield()
	dir := c.scanner.proc + "/" + pid
	if c.table(pid, dir) > 0 {
		return
	}
	if isKernelThread(dir) {
		c.scanner.kernel[pid] = inode
		return
	}
	err := eachEntry(dir+"/task", func(_ int, thread string, _ uint64) {
		if thread != pid && thread[0] != '.' {
			c.table(pid, dir+"/task/"+thread)
		}
	})
	if err != nil && !isGone(err) {
		c.unknown(fmt.Errorf("process %s (%.40q): %w", pid, programOf(dir), err))
	}
}

// table examines one descriptor table and returns how many descriptors it has.
func (c *scan) table(pid, dir string) (descriptors int) {
	matched := make(map[File]bool)
	err := eachEntry(dir+"/fd", func(at int, fd string, _ uint64) {
		if fd[0] == '.' {
			return
		}
		descriptors++
		c.loop.Yield()
		f, err := identify(at, fd)
		if err == nil && f != (File{}) && c.want[f] && !matched[f] {
			matched[f], err = holds(at, fd, dir, f)
		}
		if err != nil && !isGone(err) {
			c.unknown(fmt.Errorf("process %s (%.40q), descriptor %s: %w", pid, programOf(dir), fd, err))
		}
	})
	if err != nil && !isGone(err) {
		c.unknown(fmt.Errorf("process %s (%.40q): its descriptors cannot be read: %w", pid, programOf(dir), err))
	}
	number, _ := strconv.Atoi(pid) // of digits
	for f, counts := range matched {
		if counts {
			c.found = append(c.found, Holder{File: f, PID: number, Program: programOf(dir)})
		}
	}
	return descriptors
}

func (c *scan) unknown(err error) {
	if c.err == nil {
		c.err = err
	}
}

// identify returns the file that a descriptor is open on. It opens nothing, and does not query
// the server of a network or FUSE filesystem, which may hang.
func identify(dir int, fd string) (File, error) {
	var st unix.Statx_t
	if err := unix.Statx(dir, fd, unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE|unix.STATX_INO, &st); err != nil {
		return File{}, err
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFBLK:
		return File{Block: true, Major: st.Rdev_major, Minor: st.Rdev_minor}, nil
	case unix.S_IFREG:
		return File{Major: st.Dev_major, Minor: st.Dev_minor, Inode: st.Ino}, nil
	}
	return File{}, nil
}

// holds reports whether the process of a directory has a file open by a descriptor. That of a
// fork of this process does not count: it is closed when the fork begins its program.
func holds(at int, fd, dir string, f File) (bool, error) {
	if counts, err := countsAsOpen(dir+"/fdinfo/"+fd, f); err != nil || !counts || isOwnFork(dir) {
		return false, err
	}
	now, err := identify(at, fd)
	return now == f, err
}

// countsAsOpen reports whether a descriptor counts. One that only names the file (O_PATH) does
// not, nor one that only reads a regular file, such as that of a backup of a disk image.
func countsAsOpen(fdinfo string, f File) (bool, error) {
	raw, err := os.ReadFile(fdinfo) //nolint:gosec // below /proc
	if err != nil {
		return false, err
	}
	var flags uint64
	for line := range strings.Lines(string(raw)) {
		if text, ok := strings.CutPrefix(line, "flags:"); ok {
			if _, err := fmt.Sscanf(text, "%o", &flags); err != nil {
				return false, fmt.Errorf("%s cannot be understood: %w", fdinfo, err)
			}
		}
	}
	return flags&unix.O_PATH == 0 && (f.Block || flags&unix.O_ACCMODE != unix.O_RDONLY), nil
}
