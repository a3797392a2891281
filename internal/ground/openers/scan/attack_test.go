package scan

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/fuse"
)

// attacks is what the test program does as another process. It then holds it.
var attacks = map[string]func(arg string) error{
	"many": openMany, "share": share, "fuse": holdOnFUSE, "exec": hangInExec, "shutdown": shutDown, "blind": findBlind,
}

const nobody = 65534

var asNobody = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}

// device is a block device that nobody has open.
var device = File{Block: true, Major: 7, Minor: 1 << 19}

// openDir is a directory that every user can reach.
func openDir(t *testing.T) string {
	t.Helper()
	dir := check.Value(os.MkdirTemp("", "scan"))(t)
	check.Must(t, os.Chmod(dir, 0o777)) // not what the umask leaves
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func expect(t *testing.T, s *Scanner, f File, holder, failed int) {
	t.Helper()
	began := time.Now()
	found, err := s.Find(t.Context(), nil, f)
	t.Logf("%v: %v, %v after %v", f, found, err, time.Since(began).Round(time.Millisecond/10))
	check.That(t, (holder != 0 || len(found) == 0) && (holder == 0 || len(found) != 0 && found[0].PID == holder),
		"%v: found %v, want process %d", f, found, holder)
	check.That(t, (err != nil) == (failed != 0) && (err == nil || strings.Contains(err.Error(), "process "+strconv.Itoa(failed))),
		"%v: error %v, want one that names process %d", f, err, failed)
}

func openMany(many string) error {
	n, _ := strconv.Atoi(many)
	null, err := unix.Open("/dev/null", unix.O_RDONLY, 0)
	for i := 1; i < n && err == nil; i++ {
		_, err = unix.Dup(null)
	}
	return err
}

// share has 50 processes with one descriptor table.
func share(arg string) error {
	many, path, _ := strings.Cut(arg, ":")
	if err := openMany(many); err != nil {
		return err
	}
	if _, err := unix.Open(path, unix.O_RDWR, 0); err != nil {
		return err
	}
	runtime.LockOSThread() // whose end is that of its children
	self := uintptr(os.Getpid())
	for range 50 {
		pid, _, errno := unix.RawSyscall6(unix.SYS_CLONE, unix.CLONE_FILES|uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
		if errno != 0 {
			return errno
		}
		for pid == 0 { // in the child: only raw system calls
			_, _, _ = unix.RawSyscall(unix.SYS_PRCTL, unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0)
			if parent, _, _ := unix.RawSyscall(unix.SYS_GETPPID, 0, 0, 0); parent != self { // it has ended before that
				_, _, _ = unix.RawSyscall(unix.SYS_EXIT_GROUP, 1, 0, 0)
			}
			_, _, _ = unix.RawSyscall6(unix.SYS_PPOLL, 0, 0, 0, 0, 0, 0) // for ever
		}
	}
	return nil
}

// TestASharedTableIsReadOnce: one table costs a user nothing for each process that shares it.
func TestASharedTableIsReadOnce(t *testing.T) {
	check.NeedsRoot(t)
	path := filepath.Join(openDir(t), "disk.img")
	check.Must(t, os.WriteFile(path, nil, 0o600))
	check.Must(t, os.Chown(path, nobody, nobody))
	var limit unix.Rlimit
	check.Must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	many := min(20_000, int(limit.Max)-100)
	holder := startAs(t, asNobody, "share", strconv.Itoa(many)+":"+path)
	s, looks := New(), atomic.Int64{}
	s.statx = func(dir, fd, mask int, st *unix.Statx_t) error {
		looks.Add(1)
		return statx(dir, fd, mask, st)
	}
	expect(t, s, device, 0, 0)
	t.Logf("%d looks at one table of %d and the machine's", looks.Load(), many)
	check.That(t, looks.Load() >= int64(many) && looks.Load() <= int64(4*many), "%d looks", looks.Load())
	expect(t, s, fileAt(t, path), holder.Process.Pid, 0)
}

func fileAt(t *testing.T, path string) File {
	t.Helper()
	var st unix.Stat_t
	check.Must(t, unix.Stat(path, &st))
	if st.Mode&unix.S_IFMT == unix.S_IFBLK {
		return File{Block: true, Major: unix.Major(st.Rdev), Minor: unix.Minor(st.Rdev)}
	}
	return File{Major: unix.Major(st.Dev), Minor: unix.Minor(st.Dev), Inode: st.Ino}
}

func processes(t *testing.T) map[int]bool {
	t.Helper()
	entries := check.Value(os.ReadDir("/proc"))(t)
	all := make(map[int]bool)
	for _, entry := range entries {
		if pid, err := strconv.Atoi(entry.Name()); err == nil {
			all[pid] = true
		}
	}
	return all
}

// holdOnFUSE opens a file of its own filesystem.
func holdOnFUSE(dir string) error {
	server, err := fuse.Mount(dir, nil)
	if err != nil {
		return err
	}
	for _, first := range []bool{true, false} {
		// The first one is closed again, and the kernel learns that there is no FUSE_FLUSH:
		// when this process is killed, nobody answers.
		fd, err := unix.Open(server.File, unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		if first {
			_ = unix.Close(fd)
		}
	}
	return nil
}

// hangInExec has a child with a big table that hangs in exec: the kernel waits for the filesystem when it
// closes a file, and holds the lock that others need who look at the child. That ends with this process:
// nobody else has the filesystem's server open, and this process no file of it.
func hangInExec(dir string) error {
	server, err := fuse.Mount(dir, nil)
	if err != nil {
		return err
	}
	server.Flushed.Store(0)
	file, err := unix.Open(server.File, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	if err := openMany("300"); err != nil {
		return err
	}
	program, err := unix.BytePtrFromString("/bin/true")
	if err != nil {
		return err
	}
	begin, args, one := make([]int, 2), []*byte{program, nil}, make([]byte, 1)
	if err := unix.Pipe2(begin, unix.O_CLOEXEC); err != nil {
		return err
	}
	pid, _, errno := unix.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if pid == 0 { // in the child: only raw system calls
		_, _, _ = unix.RawSyscall(unix.SYS_CLOSE, uintptr(server.Dev), 0, 0)
		_, _, _ = unix.RawSyscall(unix.SYS_CLOSE, uintptr(begin[1]), 0, 0)
		_, _, _ = unix.RawSyscall(unix.SYS_READ, uintptr(begin[0]), uintptr(unsafe.Pointer(&one[0])), 1)
		_, _, _ = unix.RawSyscall(unix.SYS_EXECVE, uintptr(unsafe.Pointer(program)), uintptr(unsafe.Pointer(&args[0])), 0)
		_, _, _ = unix.RawSyscall(unix.SYS_EXIT_GROUP, 1, 0, 0)
	}
	if err := unix.Close(file); err != nil {
		return err
	}
	server.Flushed.Store(fuse.NoAnswer)
	if err := unix.Close(begin[1]); err != nil || errno != 0 {
		return fmt.Errorf("clone: %w, close: %w", errno, err)
	}
	time.Sleep(50 * time.Millisecond)
	return nil
}

// TestHangingInExec: such a process stops ps, but not the scan. It runs only by itself, because
// it also stops all other tests of the machine that read /proc.
func TestHangingInExec(t *testing.T) {
	check.NeedsRoot(t)
	if os.Getenv("CRUST_TEST_HANGING_EXEC") == "" {
		t.Skip("this makes other readers of /proc hang: set CRUST_TEST_HANGING_EXEC")
	}
	dir := fuseDir(t)
	holder := startAs(t, inUserNamespace(), "exec", dir)
	s := New()
	s.hangTime = 200 * time.Millisecond
	for range 3 {
		expect(t, s, device, 0, 0)
	}
	hung := func() int { s.mu.Lock(); defer s.mu.Unlock(); return len(s.hung) }
	check.That(t, hung() == 1 || hung() == 2, "%d looks hang", hung())
	check.Must(t, holder.Process.Kill())
	check.Eventually(t, "the looks return", func() bool { return hung() == 0 })
}

// fuseDir is a directory with what holdOnFUSE needs.
func fuseDir(t *testing.T) string {
	dir := openDir(t)
	check.Must(t, fuse.Prepare(dir))
	return dir
}

// inUserNamespace is for a process of a user without rights, root in a namespace of its own.
func inUserNamespace() *syscall.SysProcAttr {
	ids := []syscall.SysProcIDMap{{HostID: nobody, Size: 1}}
	return &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWUSER | unix.CLONE_NEWNS, UidMappings: ids, GidMappings: ids,
		Credential: &syscall.Credential{NoSetGroups: true},
	}
}

// TestAnothersFUSE: root may not look at the files of such a filesystem, and they stop nobody.
func TestAnothersFUSE(t *testing.T) {
	check.NeedsRoot(t)
	dir := fuseDir(t)
	holder := startAs(t, inUserNamespace(), "fuse", dir)
	_, statErr := os.Stat(descriptorOf(t, holder.Process.Pid, dir+"/at/file"))
	check.That(t, statErr != nil, "root can look at the file: this tests nothing")
	_, image := imageOf(t)
	image.Inode = fuse.Inode
	s := New()
	for _, f := range []File{device, image} {
		expect(t, s, f, 0, 0)
	}
	on := mountOf(t, holder.Process.Pid, dir+"/at")
	expect(t, s, File{Major: on.major, Minor: on.minor, Inode: fuse.Inode}, 0, holder.Process.Pid)
}

func descriptorOf(t *testing.T, pid int, path string) string {
	t.Helper()
	all := check.Value(filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid)))(t)
	for _, fd := range all {
		if to, err := os.Readlink(fd); err == nil && to == path {
			return fd
		}
	}
	t.Fatalf("process %d does not have %s open", pid, path)
	return ""
}

func mountOf(t *testing.T, pid int, path string) filesystem {
	t.Helper()
	raw := check.Value(os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid)))(t)
	for line := range strings.Lines(string(raw)) {
		if _, on := parseMount(line); on.known && strings.Fields(line)[4] == path {
			return on
		}
	}
	t.Fatalf("nothing is mounted at %s", path)
	return filesystem{}
}

// shutDown opens a file and has its xfs give up, as it does after a failure of its disk.
func shutDown(path string) error {
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	const goingDown, noLogFlush = 0x8004587d, 2 // XFS_IOC_GOINGDOWN
	return unix.IoctlSetPointerInt(fd, goingDown, noLogFlush)
}

// TestAFailedFilesystem answers EIO for all its files. Only its own images are unknown.
func TestAFailedFilesystem(t *testing.T) {
	check.NeedsRoot(t)
	check.Needs(t, check.Err(exec.LookPath("mkfs.xfs")) == nil, "mkfs.xfs")
	at, disk := t.TempDir(), filepath.Join(t.TempDir(), "xfs.img")
	check.Must(t, os.WriteFile(disk, nil, 0o600))
	check.Must(t, os.Truncate(disk, 320<<20))
	check.Run(t, exec.Command("mkfs.xfs", "-q", disk))
	check.Run(t, exec.Command("mount", "-o", "loop", disk, at))
	t.Cleanup(func() { check.Run(t, exec.Command("umount", at)) })
	path := filepath.Join(at, "disk.img")
	check.Must(t, os.WriteFile(path, nil, 0o600))
	image := fileAt(t, path)
	_, elsewhere := imageOf(t)
	elsewhere.Inode = image.Inode
	holder := start(t, "shutdown", path)
	defer func() { _ = holder.Process.Kill(); _ = holder.Wait() }() // before the unmount
	_, err := os.Stat(descriptorOf(t, holder.Process.Pid, path))
	check.That(t, err != nil, "the file can be looked at: this tests nothing")
	s := New()
	other := image
	other.Inode++
	for _, f := range []File{device, elsewhere, other} {
		expect(t, s, f, 0, 0)
	}
	expect(t, s, image, 0, holder.Process.Pid)
}

func imageOf(t *testing.T) (string, File) { return image(t) }

// hanging has looks at a file hang until the returned function is called.
func hanging(s *Scanner, f File) (release func()) {
	wait := make(chan struct{})
	s.hangTime = 500 * time.Millisecond
	s.statx = func(dir, fd, mask int, st *unix.Statx_t) error {
		err := statx(dir, fd, mask, st)
		if err == nil && f == (File{Major: st.Dev_major, Minor: st.Dev_minor, Inode: st.Ino}) && !f.Block ||
			f.Block && st.Mode&unix.S_IFMT == unix.S_IFBLK && f == (File{Block: true, Major: st.Rdev_major, Minor: st.Rdev_minor}) {
			<-wait
		}
		return err
	}
	return func() { close(wait) }
}

// TestAHangingLook is passed over, whoever asks, and looked at again when it returns.
func TestAHangingLook(t *testing.T) {
	check.NeedsRoot(t)
	path, f := image(t)
	_, free := image(t)
	holder := start(t, "rw", path)
	shm := check.Value(os.CreateTemp("/dev/shm", "scan"))(t)
	t.Cleanup(func() { _ = shm.Close(); _ = os.Remove(shm.Name()) })
	other := fileAt(t, shm.Name())
	second := start(t, "rw", shm.Name())
	s := New()
	release := hanging(s, f)
	for range 3 {
		expect(t, s, f, 0, holder.Process.Pid)
		expect(t, s, free, 0, 0)
		expect(t, s, device, 0, 0)
		expect(t, s, other, second.Process.Pid, 0)
	}
	s.mu.Lock()
	check.That(t, len(s.hung) == 1, "%d looks hang", len(s.hung))
	s.mu.Unlock()
	release()
	check.Eventually(t, "the look has returned", func() bool { s.mu.Lock(); defer s.mu.Unlock(); return len(s.hung) == 0 })
	expect(t, s, f, holder.Process.Pid, 0)
}

// TestADeviceIsNotPassedOver: a look at a device that seems to hang, on a busy machine, is not
// taken for one at a file of a filesystem that failed.
func TestADeviceIsNotPassedOver(t *testing.T) {
	check.NeedsRoot(t)
	var path string
	nodes, _ := filepath.Glob("/sys/class/block/*")
	for _, node := range nodes {
		if strings.HasPrefix(filepath.Base(node), "loop") {
			continue // somebody may be about to detach it
		}
		if file, err := os.Open("/dev/" + filepath.Base(node)); err == nil {
			_, path = file.Close(), file.Name()
			break
		}
	}
	check.Needs(t, path != "", "a block device")
	f, s := fileAt(t, path), New()
	for pid := range processes(t) {
		s.skip = append(s.skip, pid)
	}
	holder := start(t, "ro", path)
	release := hanging(s, f)
	expect(t, s, f, 0, holder.Process.Pid)
	time.AfterFunc(100*time.Millisecond, release)
	check.Eventually(t, "the look has returned", func() bool { s.mu.Lock(); defer s.mu.Unlock(); return len(s.hung) == 0 })
	expect(t, s, f, holder.Process.Pid, 0)
}

// TestTooManyHang: their threads are bounded, and the processes are named.
func TestTooManyHang(t *testing.T) {
	check.NeedsRoot(t)
	path, f := image(t)
	start(t, "rw", path)
	s := New()
	s.hangTime = time.Minute // the first look has no place to hang in, and a slow one must not need it
	for fd := range int64(maxHung) {
		s.hung[place{id: 4711, fd: fd}] = 0
	}
	expect(t, s, device, 0, 0)
	defer hanging(s, f)()
	expect(t, s, device, 0, 4711)
}

// TestASlowScanNamesAProcess that was being read when its time was over.
func TestASlowScanNamesAProcess(t *testing.T) {
	holder := start(t, "many", "100")
	s := New()
	s.scanTime = 50 * time.Millisecond
	for pid := range processes(t) {
		if pid != holder.Process.Pid {
			s.skip = append(s.skip, pid)
		}
	}
	s.statx = func(int, int, int, *unix.Statx_t) error { time.Sleep(10 * time.Millisecond); return unix.ENOENT }
	expect(t, s, device, 0, holder.Process.Pid)
}

// TestAContainerIsBlind without the node's PID namespace, even if its first process is a shell.
func TestAContainerIsBlind(t *testing.T) {
	check.NeedsRoot(t)
	cmd := exec.Command("sh", "-c", `mount --make-rprivate / && mount -t proc proc /proc && { "$0"; true; }`, os.Args[0])
	cmd.Env = append(os.Environ(), holderEnv+"=blind:")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS}
	out, err := cmd.CombinedOutput()
	check.That(t, err == nil && strings.Contains(string(out), "its pod needs hostPID: true"), "%v, %s", err, out)
}

// findBlind asks in another PID namespace, and fails with the answer.
func findBlind(string) error {
	return check.Err(New().Find(context.Background(), nil, device))
}
