package scan

import (
	"errors"
	"maps"
	"os"
	"runtime"
	"slices"
	"strconv"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

const (
	// bigTable is how many descriptors of a table are read before it is compared with the
	// tables that were read: processes can share one (CLONE_FILES).
	bigTable = 256
	// maxCompared bounds these comparisons, which then take no longer than reading so far.
	maxCompared = 256
	// pause is after how many descriptors other goroutines may run: about 0.5 ms.
	pause = 1024
	// noFD is the position of a walk that looks at no descriptor.
	noFD = -1
)

// walk is one walk through /proc. Its own goroutine changes it. A walk that hangs is
// abandoned, and another one takes its place.
type walk struct {
	s      *Scanner
	want   map[File]bool
	before map[string]uint64  // the kernel threads that the last scan found
	hung   map[*walk]position // the looks that hang, as of the beginning
	stop   atomic.Bool        // set by others

	table atomic.Pointer[table] // the position, which others read
	fd    atomic.Int64
	steps int
	read  []*table     // big tables, the one that was met last at the end
	away  map[int]bool // IDs of the mounts on which a look hangs

	ended bool // under the scanner's lock
	done  chan struct{}
	// The results.
	kernel map[string]uint64
	passed []*walk // the hanging looks that mattered
	found  []sighting
	err    error
}

// table is a descriptor table, by a process or thread that has it.
type table struct {
	pid, id int
	dir     string             // of the thread id below /proc
	inode   uint64             // of dir: another process with the same PID has another
	stuck   bool               // it hangs in exec
	held    map[File]bool      // found already, or suspected
	mounts  map[int]filesystem // read when needed
}

// position is where a walk is.
type position struct {
	table *table
	fd    int64
}

func (p position) is(t *table, fd int64) bool {
	return p.table != nil && p.table.id == t.id && p.table.inode == t.inode && p.fd == fd
}

func newWalk(s *Scanner, want map[File]bool) *walk {
	w := &walk{
		s: s, want: want, before: s.kernel, hung: maps.Clone(s.hung), away: make(map[int]bool),
		done: make(chan struct{}), kernel: make(map[string]uint64, len(s.kernel)),
	}
	w.fd.Store(noFD)
	return w
}

func (w *walk) position() position { return position{w.table.Load(), w.fd.Load()} }

func (w *walk) all() {
	defer close(w.done)
	err := eachEntry(w.s.proc, func(_ int, name string, inode uint64) bool {
		pid, err := strconv.Atoi(name)
		if err != nil || slices.Contains(w.s.skip, pid) {
			return true
		}
		if w.before[name] == inode {
			w.kernel[name] = inode
			return true
		}
		w.process(pid, name, inode)
		return !w.stop.Load()
	})
	if err != nil && w.err == nil {
		w.err = err
	}
	w.s.mu.Lock()
	defer w.s.mu.Unlock()
	w.ended = true
	delete(w.s.hung, w)
}

// process examines one process. If its first thread has ended, the process's own directory
// shows no descriptors, but its other threads may have some, all of the same table.
func (w *walk) process(pid int, name string, inode uint64) {
	own := &table{pid: pid, id: pid, dir: w.s.proc + "/" + name, inode: inode}
	if w.descriptors(own, bigTable) > 0 {
		return
	}
	if !own.stuck && isKernelThread(own.dir) {
		w.kernel[name] = inode
		return
	}
	err := eachEntry(own.dir+"/task", func(_ int, thread string, inode uint64) bool {
		if id, err := strconv.Atoi(thread); err == nil && id != pid {
			w.descriptors(&table{pid: pid, id: id, dir: own.dir + "/task/" + thread, inode: inode}, 1)
		}
		return !w.stop.Load()
	})
	if err != nil && !isGone(err) {
		w.unknown(own, err)
	}
}

// descriptors examines a table and returns how many descriptors it has. At the given one it
// ends if the table is one that was read.
func (w *walk) descriptors(t *table, compareAt int) (n int) {
	w.table.Store(t)
	w.fd.Store(noFD)
	t.stuck = w.isStuck(t)
	err := eachEntry(t.dir+"/fd", func(dir int, name string, _ uint64) bool {
		fd, err := strconv.ParseInt(name, 10, 32)
		if err != nil {
			return true
		}
		if n++; n > w.s.budget {
			w.unknown(t, budgetError(w.s.budget))
			return false
		}
		if n == compareAt && w.wasRead(t) {
			return false
		}
		w.fd.Store(fd)
		if w.steps++; w.steps%pause == 0 {
			runtime.Gosched()
		}
		w.descriptor(t, dir, name, fd)
		return !w.stop.Load()
	})
	w.fd.Store(noFD)
	if err != nil && !isGone(err) {
		w.unknown(t, unreadableError(err))
	}
	return n
}

// isStuck reports whether a process hangs in exec, as one does that has a file of a FUSE
// filesystem that does not answer when exec closes it. The kernel then makes everybody wait who
// looks at the process (its descriptors, its stat, its exe), but not who reads its fdinfo.
func (w *walk) isStuck(t *table) bool {
	if other := w.hangs(t, noFD); other != nil {
		w.passed = append(w.passed, other)
		return true
	}
	for _, at := range w.hung {
		if at.is(t, at.fd) { // is that the process, or one file?
			_, _ = os.Readlink(t.dir + "/cwd")
			break
		}
	}
	return false
}

// wasRead reports whether another process shares the table and was examined. If many looks hang, nothing is compared: what is
// left of their bound is needed for looks at descriptors.
func (w *walk) wasRead(t *table) bool {
	w.fd.Store(noFD)
	if len(w.hung) >= maxHung/2 || t.stuck {
		return false
	}
	// With this process first: if that hangs, the other one is the reason.
	if _, err := sharesFiles(os.Getpid(), t.id); err != nil {
		return false
	}
	for i := len(w.read) - 1; i >= max(0, len(w.read)-maxCompared); i-- {
		known := w.read[i]
		if same, err := sharesFiles(known.id, t.id); err != nil || !same || inodeOf(known.dir) != known.inode {
			continue
		}
		w.read = append(slices.Delete(w.read, i, i+1), known)
		return true
	}
	w.read = append(w.read, t)
	return false
}

// hangs returns the abandoned walk that hangs there, or nil.
func (w *walk) hangs(t *table, fd int64) *walk {
	for other, at := range w.hung {
		if at.is(t, fd) {
			return other
		}
	}
	return nil
}

func (w *walk) descriptor(t *table, dir int, name string, fd int64) {
	if t.stuck || w.isAway(t, name, fd) {
		w.unseen(t, dir, name, sys.ErrHangs)
		return
	}
	f, err := w.identify(dir, name)
	if err == nil && f != (File{}) && w.want[f] && !t.held[f] {
		var counts bool
		if counts, err = w.holds(t, dir, name, f); counts || err != nil && !isGone(err) {
			w.saw(t, f, name, err)
		}
		return
	}
	if err != nil && !isGone(err) {
		w.unseen(t, dir, name, err)
	}
}

// isAway reports whether a descriptor must not be looked at: that hangs, or it hangs for
// another file of the same mount.
func (w *walk) isAway(t *table, name string, fd int64) bool {
	if len(w.hung) == 0 {
		return false
	}
	other := w.hangs(t, fd)
	if other == nil && len(w.away) == 0 {
		return false
	}
	info, err := readInfo(t.dir + "/fdinfo/" + name)
	if other != nil {
		w.passed = append(w.passed, other)
		if err == nil && info.mount != 0 {
			w.away[info.mount] = true
		}
		return true
	}
	return err == nil && w.away[info.mount]
}

// unseen decides which files a descriptor may be that cannot be looked at. fdinfo tells its
// inode and mount without any help of its filesystem.
//   - A wanted image has the same inode, and is on the same filesystem or on an unknown one.
//   - A wanted block device is on devtmpfs or tmpfs, and no character device of /dev. These do
//     not fail: only where the look was denied (by a security module), or hangs, is the
//     filesystem checked.
//
// Without the right to read fdinfo (CAP_SYS_PTRACE) it may be anything.
func (w *walk) unseen(t *table, dir int, name string, cause error) {
	info, err := readInfo(t.dir + "/fdinfo/" + name)
	if err != nil {
		if w.err == nil && !isGone(err) && !t.isOwnFork() {
			w.unknown(t, err)
		}
		return
	}
	var on filesystem
	var st unix.Statx_t
	if isDenied(cause) && w.s.statx(dir, name, 0, &st) == nil { // FUSE answers to an empty mask
		on = filesystem{known: true, major: st.Dev_major, minor: st.Dev_minor}
	}
	for f := range w.want {
		if !t.held[f] && info.counts(f) && t.mayHave(f, info, on, cause) && !t.isOwnFork() {
			w.saw(t, f, name, cause)
		}
	}
}

func isDenied(err error) bool { return errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM) }

// mayHave reports whether f may be the unseen file of a descriptor. It reads the mounts only
// when the answer depends on them.
func (t *table) mayHave(f File, info fdInfo, on filesystem, cause error) bool {
	if f.Block && !isDenied(cause) && !errors.Is(cause, sys.ErrHangs) {
		return false
	}
	if !f.Block && info.inode != 0 && info.inode != f.Inode {
		return false
	}
	if !on.known {
		on = t.filesystem(info.mount)
	}
	if f.Block && isCharacterDevice(on, info.inode) {
		return false
	}
	return on.mayHave(f, isDenied(cause))
}

// saw records that a process has a file open or, with an error, may have.
func (w *walk) saw(t *table, f File, fd string, err error) {
	h := Holder{File: f, PID: t.pid, Program: t.program()}
	if err != nil {
		err = lookError(h, fd, err)
	}
	if t.held == nil {
		t.held = make(map[File]bool)
	}
	t.held[f] = true
	w.found = append(w.found, sighting{h, err})
}

// unknown records that a process may have any file open.
func (w *walk) unknown(t *table, err error) {
	if w.err == nil {
		w.err = processError(Holder{PID: t.pid, Program: t.program()}, err)
	}
}

// identify returns the file that a descriptor is open on. It opens nothing, and does not query
// the server of a network or FUSE filesystem, which may hang.
func (w *walk) identify(dir int, fd string) (File, error) {
	var st unix.Statx_t
	if err := w.s.statx(dir, fd, unix.STATX_TYPE|unix.STATX_INO, &st); err != nil {
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
func (w *walk) holds(t *table, dir int, fd string, f File) (bool, error) {
	if info, err := readInfo(t.dir + "/fdinfo/" + fd); err != nil || !info.counts(f) || t.isOwnFork() {
		return false, err
	}
	now, err := w.identify(dir, fd)
	return err == nil && now == f, err
}
