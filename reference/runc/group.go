package runc

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/capture"
	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/reference/fsmount"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
	"github.com/crust-proxy/crust-proxy/reference/handler"
	"github.com/crust-proxy/crust-proxy/reference/process"
)

// groupTime is how long this process itself changes the group of files. The container runtime kills it after about two
// minutes, and its mount ends with it: with millions of files it would never finish.
const groupTime = 20 * time.Second

// commandGroup is the command with which this program starts itself to change the group of all
// files, however long that takes.
const commandGroup = "attach-with-group"

// The open files of that process.
const (
	lockFD  = 3 + iota // the locked directory for volumes in the sandbox
	mountFD            // the volume's detached mount
)

// attachWithGroup applies the volume's group and attaches it in the sandbox. If that takes long,
// a separate process does it, which is not killed together with this one. It keeps the lock,
// and the next attempt finds the volume in the sandbox.
func attachWithGroup(p pause, lock, mount int, volume string, info abi.Info) error {
	ctx, cancel := context.WithTimeout(context.Background(), groupTime)
	defer cancel()
	failpoint.Hit("crust-runc-group")
	err := fsmount.ApplyGroup(ctx, mount, info)
	if err == nil {
		return p.attach(lock, mount, volume)
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return startGroup(p, lock, mount, volume, info)
	}
	return err
}

// startGroup starts the process that does the same as attachWithGroup, and waits for it.
func startGroup(p pause, lock, mount int, volume string, info abi.Info) error {
	gid, _, err := info.Group()
	if err != nil {
		return err
	}
	stderr, err := capture.New(4 << 10)
	if err != nil {
		return err
	}
	defer func() { _ = stderr.Close() }()
	cmd := exec.Command("/proc/self/exe", abi.Word, commandGroup, volume, strconv.FormatUint(uint64(gid), 10), //nolint:gosec // this very program
		string(info.GroupPolicy()), strconv.Itoa(p.PID), strconv.FormatUint(p.Start, 10))
	cmd.Dir, cmd.Env, cmd.Stderr = "/", []string{}, stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	for _, fd := range []int{lock, mount} {
		own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return err
		}
		file := os.NewFile(uintptr(own), "")
		defer func() { _ = file.Close() }()
		cmd.ExtraFiles = append(cmd.ExtraFiles, file)
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("no process can be started that gives its files to the group %d: %w", gid, err)
	}
	failpoint.Hit("crust-runc-group-started")
	if err := cmd.Wait(); err != nil {
		said, _, _ := capture.Text(stderr)
		return fmt.Errorf("its files were not given to the group %d: %w: %s", gid, err, strings.TrimSpace(said))
	}
	return nil
}

// groupMain is the main function of that process. It ends with the sandbox, because its mount keeps the device busy.
func groupMain(args []string, stderr io.Writer) int {
	err := attachGroup(args)
	if err != nil {
		_, _ = fmt.Fprintln(stderr, err)
	}
	return handler.ExitStatus(err)
}

func attachGroup(args []string) error {
	process.CloseInherited(mountFD)
	gid, gidErr := strconv.ParseUint(args[1], 10, 32)
	pid, pidErr := strconv.Atoi(args[3])
	start, startErr := strconv.ParseUint(args[4], 10, 64)
	if err := errors.Join(gidErr, pidErr, startErr); err != nil {
		return fmt.Errorf("%w: %w", handler.ErrUsage, err)
	}
	p := pause{process.Process{PID: pid, Start: start}}
	ctx := sandboxContext(p)
	if _, err := fsops.ApplyGroup(ctx, mountFD, uint32(gid), volume.GroupPolicy(args[2])); err != nil {
		return cmp.Or(context.Cause(ctx), err)
	}
	return p.attach(lockFD, mountFD, args[0])
}

// sandboxContext returns a context that ends soon after the sandbox: in a second some 100,000 files would be changed.
func sandboxContext(p pause) context.Context {
	ctx, cancel := context.WithCancelCause(context.Background())
	go func() {
		for !p.Ended() {
			time.Sleep(20 * time.Millisecond)
		}
		cancel(process.ErrEnded)
	}()
	return ctx
}
