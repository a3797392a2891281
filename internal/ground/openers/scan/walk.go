package scan

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// scan is one walk through /proc, for all callers that came before it began.
type scan struct {
	s     *Scanner
	want  map[File]bool // does not change after the scan began
	until time.Time

	read   []*table // big tables, which other processes may share
	passed []place  // the hanging looks that mattered

	done  chan struct{} // closed at the end; the results do not change after that
	found []sighting
	err   error // concerns all files
}

// sighting is a holder or, with an error, a process that may be one.
type sighting struct {
	Holder
	file File
	err  error
}

// place is where a look may hang.
type place struct {
	id    int
	inode uint64 // of the process or thread: another one with the same number has another
	fd    int64  // noFD is the process as a whole
}

// noFD is the place of a look at no descriptor.
const noFD = -1

// run walks until no look that was believed to hang has returned: what was passed over because of
// it may be a device on a busy machine, and has to be looked at again.
func (c *scan) run() {
	c.until = time.Now().Add(c.s.scanTime)
	for again := true; again; again = c.err == nil && c.hasReturned() {
		c.read, c.passed, c.found = nil, nil, nil
		c.fail(eachNumber(c.s.proc, func(_, pid int) bool { return slices.Contains(c.s.skip, pid) || c.process(pid) }))
	}
}

// fail records why any file may be open.
func (c *scan) fail(err error) {
	if c.err == nil {
		c.err = err
	}
}

func (c *scan) hasReturned() bool {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	return slices.ContainsFunc(c.passed, func(p place) bool { _, hangs := c.s.hung[p]; return !hangs })
}

// process examines one process, and reports whether the scan can go on. If its first thread has ended, the
// process's own directory shows no descriptors, but its other threads may have some, all of the same table.
func (c *scan) process(pid int) (more bool) {
	dir := c.s.proc + "/" + strconv.Itoa(pid)
	threads, more := c.examine(table{pid: pid, id: pid, dir: dir, compareAt: bigTable})
	for i := 0; i < len(threads) && more; i++ {
		id := threads[i]
		_, more = c.examine(table{pid: pid, id: id, dir: dir + "/task/" + strconv.Itoa(id), compareAt: 1})
	}
	return more
}

// examine looks at a table, and again without each descriptor at which a look hangs. It returns the
// other threads of a process that has no descriptors.
func (c *scan) examine(of table) (threads []int, more bool) {
	of.scan, of.inode, of.known = c, inodeOf(of.dir), c.read
	for {
		t := of
		t.fd = new(atomic.Int64)
		c.s.mu.Lock()
		hung := maps.Clone(c.s.hung)
		c.s.mu.Unlock()
		t.hung = maps.Clone(hung) // an abandoned look goes on with it
		at, hangs := c.look(&t)
		_, again := hung[at]
		if !hangs {
			c.learn(t.hung)
			c.found, c.passed = append(c.found, t.found...), append(c.passed, t.passed...)
			c.fail(t.err)
			if t.unlike {
				c.read = append(c.read, &t)
			}
		}
		switch {
		case !time.Now().Before(c.until):
			c.fail(fmt.Errorf("the descriptors of all processes could not be read within %s: the scan was at %s",
				c.s.scanTime, c.s.nameOf(of.id)))
			return nil, false
		case !hangs:
			return t.threads, true
		case again || len(hung)+1 >= maxHung:
			c.fail(c.s.hungError())
			return nil, false
		}
	}
}

// look examines a table, and returns where that hangs, if it makes no progress. It is then abandoned:
// nothing can interrupt the system call.
func (c *scan) look(t *table) (at place, hangs bool) {
	t.fd.Store(noFD)
	done := make(chan struct{})
	go func() { defer close(done); t.examine() }()
	for before := int64(noFD) - 1; before != t.fd.Load(); {
		before = t.fd.Load()
		select {
		case <-done:
			return place{}, false
		case <-time.After(c.s.hangTime):
		}
	}
	at = t.at(t.fd.Load())
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	c.s.hung[at] = 0 // of no mount, until the next look knows that it is the file
	go func() {
		<-done
		c.s.mu.Lock()
		defer c.s.mu.Unlock()
		delete(c.s.hung, at)
	}()
	return at, true
}

// learn keeps the mounts of files at which looks still hang.
func (c *scan) learn(mounts map[place]int) {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	for at := range c.s.hung {
		c.s.hung[at] = max(c.s.hung[at], mounts[at])
	}
}

func (s *Scanner) nameOf(pid int) string {
	return Holder{PID: pid, Program: commOf(s.proc + "/" + strconv.Itoa(pid))}.String()
}

func (s *Scanner) hungError() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var names []string
	for at := range s.hung {
		names = append(names, s.nameOf(at.id))
	}
	slices.Sort(names)
	return fmt.Errorf("%d looks at descriptors hang: those of %s", len(s.hung), strings.Join(slices.Compact(names), ", "))
}

const (
	// bigTable is how many descriptors of a table are read before it is compared with the
	// tables that were read: processes can share one (CLONE_FILES).
	bigTable = 256
	// maxCompared bounds these comparisons, which then take no longer than reading so far.
	maxCompared = 256
)

// table is a look at a descriptor table, by a process or thread that has it. The look may hang, so it
// changes nothing but itself.
type table struct {
	scan      *scan
	pid, id   int    // of the process, and of the thread
	dir       string // of the thread below /proc
	inode     uint64 // of dir
	compareAt int    // the look ends at this descriptor if the table was read
	known     []*table
	hung      map[place]int // the looks that hang, as of the beginning
	fd        *atomic.Int64 // the descriptor that it is at

	stuck  bool               // it hangs in exec
	mounts map[int]filesystem // read when needed
	held   map[File]bool      // found already, or suspected
	// The results.
	found   []sighting
	passed  []place
	threads []int // of a process without descriptors
	unlike  bool  // it is a big table, and none that was read
	err     error
}

func (t *table) at(fd int64) place { return place{t.id, t.inode, fd} }

func (t *table) examine() {
	t.stuck = t.isStuck()
	n := 0
	t.failed(eachNumber(t.dir+"/fd", func(dir, fd int) bool {
		if n++; n == t.compareAt && t.wasRead() {
			return false
		}
		t.fd.Store(int64(fd))
		t.descriptor(dir, fd)
		return time.Now().Before(t.scan.until)
	}))
	t.fd.Store(noFD)
	if n == 0 && t.id == t.pid {
		t.failed(eachNumber(t.dir+"/task", func(_, id int) bool {
			if id != t.pid {
				t.threads = append(t.threads, id)
			}
			return true
		}))
	}
}

// failed records, with an error, that the process may have any file open.
func (t *table) failed(err error) {
	if err != nil && !isGone(err) && t.err == nil {
		t.err = fmt.Errorf("%s: its descriptors cannot be read: %w", t.holder(), err)
	}
}

// isStuck reports whether a process hangs in exec, as one does that has a file of a FUSE
// filesystem that does not answer when exec closes it. The kernel then makes everybody wait who
// looks at the process (its descriptors, its stat, its exe), but not who reads its fdinfo.
func (t *table) isStuck() bool {
	if _, stuck := t.hung[t.at(noFD)]; stuck {
		t.passed = append(t.passed, t.at(noFD))
		return true
	}
	for at := range t.hung {
		if at != t.at(at.fd) {
			continue
		}
		_, _ = os.Readlink(t.dir + "/cwd") // hangs as well, if it is the process
		if info, err := t.info(int(at.fd)); err == nil {
			t.hung[at] = info.mount
		}
	}
	return false
}

// wasRead reports whether another process shares the table and was examined. If many looks hang,
// nothing is compared: what is left of their bound is needed for looks at descriptors.
func (t *table) wasRead() bool {
	t.fd.Store(noFD)
	if len(t.hung) >= maxHung/2 || t.stuck {
		return false
	}
	// With this process first: if that hangs, the other one is the reason.
	if _, err := sharesFiles(os.Getpid(), t.id); err != nil {
		return false
	}
	for _, known := range t.known[max(0, len(t.known)-maxCompared):] {
		if same, err := sharesFiles(known.id, t.id); err == nil && same && inodeOf(known.dir) == known.inode {
			return true
		}
	}
	t.unlike = true
	return false
}

func (t *table) descriptor(dir, fd int) {
	if t.isAway(fd) {
		t.unseen(dir, fd, sys.ErrHangs)
		return
	}
	f, err := t.identify(dir, fd)
	switch {
	case err != nil:
		t.unseen(dir, fd, err)
	case t.scan.want[f] && !t.held[f]:
		if counts, err := t.holds(dir, fd, f); counts || err != nil && !isGone(err) {
			t.saw(f, fd, err)
		}
	}
}

// isAway reports whether a descriptor must not be looked at: that hangs, or it hangs for
// another file of the same mount.
func (t *table) isAway(fd int) bool {
	if t.stuck || len(t.hung) == 0 {
		return t.stuck
	}
	own := t.at(int64(fd))
	if _, hangs := t.hung[own]; hangs {
		t.passed = append(t.passed, own)
		return true
	}
	var mount int // of this descriptor, read if there is one to compare it with
	for at, away := range t.hung {
		if away != 0 && mount == 0 {
			info, err := t.info(fd)
			if err != nil {
				return false
			}
			mount = info.mount
		}
		if away != 0 && away == mount {
			t.passed = append(t.passed, at)
			return true
		}
	}
	return false
}

// unseen decides which files a descriptor may be that cannot be looked at. fdinfo tells its
// inode and mount without any help of its filesystem.
//   - A wanted image has the same inode, and is on the same filesystem or on an unknown one.
//   - A wanted block device is on devtmpfs or tmpfs, and no character device of /dev. These do
//     not fail: only where the look was denied (by a security module), or hangs, is the
//     filesystem checked.
//
// Without the right to read fdinfo (CAP_SYS_PTRACE) it may be anything.
func (t *table) unseen(dir, fd int, cause error) {
	if isGone(cause) {
		return
	}
	info, err := t.info(fd)
	if err != nil {
		if t.err == nil && !t.isOwnFork() {
			t.failed(err)
		}
		return
	}
	var on filesystem
	var st unix.Statx_t
	if isDenied(cause) && t.scan.s.statx(dir, fd, 0, &st) == nil { // FUSE answers to an empty mask
		on = filesystem{known: true, major: st.Dev_major, minor: st.Dev_minor}
	}
	for f := range t.scan.want {
		if !t.held[f] && info.counts(f) && t.mayHave(f, info, on, cause) && !t.isOwnFork() {
			t.saw(f, fd, cause)
		}
	}
}

func isDenied(err error) bool { return errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM) }

// mayHave reports whether f may be the unseen file of a descriptor. It reads the mounts only
// when the answer depends on them.
func (t *table) mayHave(f File, info fdInfo, on filesystem, cause error) bool {
	denied := isDenied(cause)
	if f.Block && !denied && !errors.Is(cause, sys.ErrHangs) || !f.Block && info.inode != 0 && info.inode != f.Inode {
		return false
	}
	if !on.known {
		on = t.filesystem(info.mount)
	}
	switch {
	case !on.known:
		return !f.Block || denied
	case f.Block:
		return slices.Contains(nodeTypes, on.kind) && !isCharacterDevice(on, info.inode)
	}
	return slices.Contains(otherNumbers, on.kind) || on.major == f.Major && on.minor == f.Minor
}

var (
	// nodeTypes are the filesystems that can have device nodes and never fail.
	nodeTypes = []string{"devtmpfs", "tmpfs"}
	// otherNumbers are those that tell another number for a file than for its mount.
	otherNumbers = []string{"btrfs", "overlay"}
)

// saw records that a process has a file open or, with an error, may have.
func (t *table) saw(f File, fd int, err error) {
	h := t.holder()
	if err != nil {
		err = fmt.Errorf("%s, descriptor %d: %w", h, fd, err)
	}
	if t.held == nil {
		t.held = make(map[File]bool)
	}
	t.held[f] = true
	t.found = append(t.found, sighting{h, f, err})
}

// identify returns the file that a descriptor is open on. It opens nothing, and does not query
// the server of a network or FUSE filesystem, which may hang.
func (t *table) identify(dir, fd int) (File, error) {
	var st unix.Statx_t
	if err := t.scan.s.statx(dir, fd, unix.STATX_TYPE|unix.STATX_INO, &st); err != nil {
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

// holds reports whether a process has a file open by a descriptor. That of a fork of this
// process does not count: it is closed when the fork begins its program.
func (t *table) holds(dir, fd int, f File) (bool, error) {
	if info, err := t.info(fd); err != nil || !info.counts(f) || t.isOwnFork() {
		return false, err
	}
	now, err := t.identify(dir, fd)
	return err == nil && now == f, err
}
