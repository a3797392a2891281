//go:build system

package daemon

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// withoutCallEnv makes the test binary execute a program that may not use a system call. It has
// the number of the call and the program's path.
const withoutCallEnv = "CRUST_TEST_WITHOUT_CALL"

// execWithoutCall executes a program with the arguments of this one. The filter is that of
// this thread, which becomes the program's first.
func execWithoutCall(what string) error {
	var call uint32
	var program string
	if _, err := fmt.Sscan(what, &call, &program); err != nil {
		return err
	}
	runtime.LockOSThread()
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0}, // the number of the call, in struct seccomp_data
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: call, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	code := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&code)))
	if errno != 0 {
		return os.NewSyscallError("seccomp", errno)
	}
	if err := os.Unsetenv(withoutCallEnv); err != nil {
		return err
	}
	return unix.Exec(program, append([]string{program}, os.Args[1:]...), os.Environ())
}

// denyCall has the daemon start without a system call.
func denyCall(t *testing.T, d *rig.Daemon, call int) {
	t.Helper()
	self := check.Value(os.Executable())(t)
	programs := filepath.Join(d.Dir, "programs")
	check.Must(t, os.Mkdir(programs, 0o755))
	wrapper := fmt.Sprintf("#!/bin/sh\n%s='%d %s' exec '%s' \"$@\"\n", withoutCallEnv, call, d.Program("crust-proxy"), self)
	check.Must(t, os.WriteFile(filepath.Join(programs, "crust-proxy"), []byte(wrapper), 0o755))
	d.Programs = programs
}

// TestDaemonWithoutOpenat2 does not say that it is ready: without openat2 no path can be resolved.
func TestDaemonWithoutOpenat2(t *testing.T) {
	t.Parallel()
	d := rig.NewDaemon(t)
	denyCall(t, d, unix.SYS_OPENAT2)
	d.Launch()
	check.Equal(t, d.WaitEnd(time.Minute), 1, "it ended with")
	log := d.Log()
	check.That(t, strings.Contains(log, "without it paths cannot be resolved safely") && !strings.Contains(log, `"msg":"serving"`), "the log:\n%s", log)
}

// TestDaemonWithoutBPF reads the descriptors of all processes, says why, and still gives no device
// that a process has to a second one.
func TestDaemonWithoutBPF(t *testing.T) {
	t.Parallel()
	d := rig.NewDaemon(t)
	d.Start()
	if log := d.Log(); !strings.Contains(log, "the kernel counts who has a device open") {
		rig.Missing(t, "the kernel's count of openers")
	}
	d.Stop()

	denyCall(t, d, unix.SYS_BPF)
	before := len(d.Log())
	d.Start()
	log := d.Log()[before:]
	check.Says(t, "the log", log, "the descriptors of all processes are read instead", "operation not permitted", `"scan"`)

	disk := rig.Disk(t, 16*mib, "ext4")
	req := d.StageRequest("pod-1", disk)
	refused := func(by *rig.Holder, err error) {
		t.Helper()
		check.Code(t, err, codes.Aborted, fmt.Sprintf("process %d ", by.Process.Pid))
		by.End()
	}
	by := rig.Hold(t, "<>", disk)
	refused(by, check.Err(d.Runtime().RuntimeStageVolume(t.Context(), req)))
	stage(t, d, req)
	by = rig.Hold(t, "<", disk)
	refused(by, check.Err(d.Runtime().RuntimeUnstageVolume(t.Context(), unstageRequest(req))))
	unstage(t, d, req)
	wantGone(t, d, disk)
}
