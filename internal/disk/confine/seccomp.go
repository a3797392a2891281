package confine

import (
	"errors"
	"runtime"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// denied are the system calls that root can use without any capability against other
// processes, files that Landlock does not guard, or the kernel. They fail with EPERM.
var denied = []uint32{
	// Sockets: a process that can connect to the container runtime's socket controls the node.
	unix.SYS_SOCKET, unix.SYS_IO_URING_SETUP,
	// Other processes of root.
	unix.SYS_KILL, unix.SYS_TKILL, unix.SYS_RT_SIGQUEUEINFO, unix.SYS_RT_TGSIGQUEUEINFO,
	unix.SYS_PTRACE, unix.SYS_PROCESS_VM_READV, unix.SYS_PROCESS_VM_WRITEV, unix.SYS_PIDFD_GETFD, unix.SYS_KCMP,
	unix.SYS_PROCESS_MADVISE, unix.SYS_PROCESS_MRELEASE, unix.SYS_MIGRATE_PAGES, unix.SYS_MOVE_PAGES,
	unix.SYS_SETPRIORITY, unix.SYS_IOPRIO_SET, unix.SYS_SCHED_SETAFFINITY, unix.SYS_SCHED_SETATTR,
	unix.SYS_SCHED_SETPARAM, unix.SYS_SCHED_SETSCHEDULER,
	unix.SYS_SHMGET, unix.SYS_SHMAT, unix.SYS_SHMCTL, unix.SYS_SEMGET, unix.SYS_SEMOP, unix.SYS_SEMTIMEDOP, unix.SYS_SEMCTL,
	unix.SYS_MSGGET, unix.SYS_MSGSND, unix.SYS_MSGRCV, unix.SYS_MSGCTL, unix.SYS_MQ_OPEN, unix.SYS_MQ_UNLINK,
	// What all processes of root, or of the node, may have only so many of.
	unix.SYS_INOTIFY_INIT1, unix.SYS_FANOTIFY_INIT, unix.SYS_IO_SETUP, unix.SYS_TIMER_CREATE,
	// Files of root.
	unix.SYS_FCHMOD, unix.SYS_FCHMODAT, unix.SYS_FCHMODAT2, unix.SYS_FCHOWN, unix.SYS_FCHOWNAT, unix.SYS_TRUNCATE,
	unix.SYS_SETXATTR, unix.SYS_LSETXATTR, unix.SYS_FSETXATTR, unix.SYS_SETXATTRAT,
	unix.SYS_REMOVEXATTR, unix.SYS_LREMOVEXATTR, unix.SYS_FREMOVEXATTR, unix.SYS_REMOVEXATTRAT, unix.SYS_FILE_SETATTR,
	// Parts of the kernel that no such program needs.
	unix.SYS_UNSHARE, unix.SYS_SETNS, unix.SYS_BPF, unix.SYS_PERF_EVENT_OPEN, unix.SYS_USERFAULTFD,
	unix.SYS_ADD_KEY, unix.SYS_REQUEST_KEY, unix.SYS_KEYCTL,
}

// newest is the last call that was considered for denied. Later ones fail with ENOSYS, as on an older kernel.
const newest = unix.SYS_RSEQ_SLICE_YIELD

// The parts of struct seccomp_data. Both architectures are little-endian.
const (
	atNumber = 0
	atArch   = 4
	atArgs   = 16
)

// setXAttr is FS_IOC_FSSETXATTR of the kernel's <linux/fs.h>.
const setXAttr = 0x401c5820

// Of classic BPF.
const (
	load    = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
	ifEqual = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
	ifHas   = unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K
	ifAbove = unix.BPF_JMP | unix.BPF_JGT | unix.BPF_K
	answer  = unix.BPF_RET | unix.BPF_K
)

var (
	allow  = unix.SockFilter{Code: answer, K: unix.SECCOMP_RET_ALLOW}
	refuse = unix.SockFilter{Code: answer, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)}
	ignore = unix.SockFilter{Code: answer, K: unix.SECCOMP_RET_ERRNO} // as if it had succeeded
	absent = unix.SockFilter{Code: answer, K: unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)}
	end    = unix.SockFilter{Code: answer, K: unix.SECCOMP_RET_KILL_PROCESS}
)

// filterCalls denies the system calls to this thread and its children.
func filterCalls() error {
	arch, ok := map[string]uint32{"amd64": unix.AUDIT_ARCH_X86_64, "arm64": unix.AUDIT_ARCH_AARCH64}[runtime.GOARCH]
	if !ok {
		return nil
	}
	if _, err := unix.PrctlRetInt(unix.PR_GET_SECCOMP, 0, 0, 0, 0); errors.Is(err, unix.EINVAL) {
		return nil // a kernel without it
	}
	return install(filter(arch))
}

func install(program []unix.SockFilter) error {
	prog := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}                                 //nolint:gosec // some hundred
	err := unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&prog)), 0, 0) //nolint:gosec // how the call takes it
	runtime.KeepAlive(program)
	return err
}

func filter(arch uint32) []unix.SockFilter {
	is := func(code uint16, k uint32, then ...unix.SockFilter) []unix.SockFilter {
		return append([]unix.SockFilter{{Code: code, K: k, Jf: uint8(len(then))}}, then...) //nolint:gosec // a few
	}
	argument := func(n uint32) unix.SockFilter { return unix.SockFilter{Code: load, K: atArgs + 8*n} }
	const x32 = 1 << 30 // another table of the same calls
	program := []unix.SockFilter{{Code: load, K: atArch}, {Code: ifEqual, K: arch, Jt: 1}, end, {Code: load, K: atNumber}}
	program = append(program, is(ifAbove, x32-1, end)...)
	program = append(program, is(ifAbove, newest, absent)...)
	for _, call := range append(denied, deniedHere...) {
		program = append(program, is(ifEqual, call, refuse)...)
	}
	// Its flags cannot be seen here; C libraries then use clone.
	program = append(program, is(ifEqual, unix.SYS_CLONE3, absent)...)
	program = append(program, is(ifEqual, unix.SYS_CLONE, slices.Concat([]unix.SockFilter{argument(0)},
		is(ifHas, unix.CLONE_NEWUSER, refuse), []unix.SockFilter{allow})...)...)
	// mkfs.xfs fails if one of these fails, and both need CAP_SYS_ADMIN. It does not depend on either: its direct I/O
	// ignores the kernel's block size, and it empties the page cache only after an fsync.
	program = append(program, is(ifEqual, unix.SYS_IOCTL, slices.Concat([]unix.SockFilter{argument(1)},
		is(ifEqual, unix.BLKBSZSET, ignore), is(ifEqual, unix.BLKFLSBUF, ignore),
		is(ifEqual, unix.FS_IOC_SETFLAGS, refuse), is(ifEqual, setXAttr, refuse), is(ifEqual, unix.FS_IOC_ENABLE_VERITY, refuse),
		[]unix.SockFilter{allow})...)...)
	// By the first three the kernel sends signals for a pipe, to any process. The others would change the
	// lock file, in which each volume of the node has a byte.
	program = append(program, is(ifEqual, unix.SYS_FCNTL, slices.Concat([]unix.SockFilter{argument(1)},
		is(ifEqual, unix.F_SETOWN, refuse), is(ifEqual, unix.F_SETOWN_EX, refuse), is(ifEqual, unix.F_SETSIG, refuse),
		is(ifEqual, unix.F_SETLK, refuse), is(ifEqual, unix.F_SETLKW, refuse),
		is(ifEqual, unix.F_OFD_SETLK, refuse), is(ifEqual, unix.F_OFD_SETLKW, refuse),
		[]unix.SockFilter{allow})...)...)
	// A program may read and lower its own limits.
	program = append(program, is(ifEqual, unix.SYS_PRLIMIT64, slices.Concat([]unix.SockFilter{argument(0)},
		is(ifEqual, 0, allow), []unix.SockFilter{refuse})...)...)
	// Go's scheduler sends SIGURG to our other threads from the thread that starts the
	// program, and tries whether there are pidfds.
	program = append(program, is(ifEqual, unix.SYS_TGKILL, slices.Concat([]unix.SockFilter{argument(2)},
		is(ifEqual, uint32(unix.SIGURG), allow), []unix.SockFilter{refuse})...)...)
	program = append(program, is(ifEqual, unix.SYS_PIDFD_SEND_SIGNAL, slices.Concat([]unix.SockFilter{argument(1)},
		is(ifEqual, 0, allow), []unix.SockFilter{refuse})...)...)
	return append(program, allow)
}
