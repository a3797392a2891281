package crust

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/crust-proxy/crust-proxy/internal/ground/capture"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

const (
	// childProgram is the path of the program in the child: os/exec passes the first extra file as descriptor 3. So the
	// file that was checked is executed, whatever has its name now.
	childProgram = "/proc/self/fd/3"

	maxAnswer    = 64 << 10
	maxComplaint = 4 << 10
)

func (a *asker) askProgram(ctx context.Context, v *volume.Volume, id, path string, q *question) error {
	if !slices.Contains(a.cfg.Programs, path) {
		return volume.Errorf(volume.Denied, "volume %s: the handler of sandbox %s names the program %s, which is not "+
			"among handlers.crust.programs: add it there if it is trusted", v.Target, id, path)
	}
	file, err := openProgram(path, a.cfg.Owner)
	if err != nil {
		return volume.Errorf(volume.KindOf(err), "volume %s: sandbox %s: %w", v.Target, id, err)
	}
	ended, err := a.programs.run(ctx, v.Target+" "+q.words[0], file, path, q.words)
	switch {
	case ctx.Err() != nil:
		return contextError(v, id, ctx.Err())
	case errors.Is(err, errHangs):
		return volume.Errorf(volume.Timeout, "volume %s: the program %s of sandbox %s is not run, because an earlier one hangs: %w", v.Target, path, id, err)
	case err != nil:
		return volume.Errorf(volume.Internal, "volume %s: the program %s of sandbox %s cannot be run: %w", v.Target, path, id, err)
	case q.once && (ended.Full || ended.Code < 0):
		return volume.Errorf(volume.Timeout, "volume %s: the program %s of sandbox %s was killed: it is not known whether it did what it was asked", v.Target, path, id)
	case ended.Full:
		return volume.Errorf(volume.Exhausted, "volume %s: the program %s of sandbox %s wrote more than the %d bytes "+
			"that an answer may have", v.Target, path, id, maxAnswer)
	case ended.Code != abi.ExitOK:
		return refusal(v, id, kindOfExit(ended.Code), q.words[0], ended.Stderr)
	}
	// As in protobuf's own JSON, numbers may be numbers or strings, and names have either
	// spelling. Unknown keys are ignored.
	options := protojson.UnmarshalOptions{DiscardUnknown: true}
	if err := options.Unmarshal([]byte(ended.Stdout), q.out); err != nil {
		return malformed(v, id, err)
	}
	return nil
}

func kindOfExit(code int) volume.Kind {
	switch code {
	case abi.ExitNoSandbox:
		return volume.NoSandbox
	case abi.ExitUnsupported, abi.ExitUsage: // our arguments are right, so it does not know the question
		return volume.Unsupported
	case abi.ExitOutOfRange:
		return volume.OutOfRange
	case abi.ExitWrongState:
		return volume.InUse
	default:
		return volume.Refused
	}
}

func openProgram(path string, owner uint32) (*os.File, error) {
	file, err := sys.OpenProgram(path, owner)
	switch errno := unix.Errno(0); {
	case errors.Is(err, unix.ELOOP):
		return nil, volume.Errorf(volume.Denied, "the program %s is reached through a symbolic link: "+
			"name the file itself in handlers.crust.programs", path)
	case errors.Is(err, unix.ENOENT):
		return nil, volume.Errorf(volume.Unsupported, "the program %s is not installed", path)
	case errors.As(err, &errno):
		return nil, volume.Errorf(volume.Internal, "the program %s cannot be opened: %w", path, err)
	case err != nil:
		return nil, volume.Errorf(volume.Denied, "the program %s is not run: %w", path, err)
	}
	return file, nil
}

// errHangs: a killed program that hangs in the kernel does not end, and another one would hang as well.
var errHangs = errors.New("it was killed and does not end: see the kernel's log for the storage behind the volume")

// runner runs programs. It waits for none that does not end although it was killed.
type runner struct {
	kill     func(group int) error
	patience time.Duration // how long a killed program may take to end
	mu       sync.Mutex
	hung     map[string]int // programs that were left behind
	most     int            // of one key
}

func newRunner(most int) *runner {
	kill := func(group int) error { return unix.Kill(-group, unix.SIGKILL) }
	return &runner{kill: kill, patience: 2 * time.Second, hung: make(map[string]int), most: most}
}

// run is runProgram, unless too many programs of the same key hang. It closes the file, when no start can use it any more.
func (r *runner) run(ctx context.Context, key string, file *os.File, path string, words []string) (capture.Output, error) {
	if !r.mayRun(key) {
		_ = file.Close()
		return capture.Output{}, errHangs
	}
	type outcome struct {
		out capture.Output
		err error
	}
	done := make(chan outcome)
	left := make(chan struct{})
	go func() {
		out, err := runProgram(ctx, r.kill, file, path, words)
		_ = file.Close()
		select {
		case done <- outcome{out, err}:
		case <-left:
			r.count(key, -1)
		}
	}()
	select {
	case ended := <-done:
		return ended.out, ended.err
	case <-ctx.Done():
	}
	select {
	case ended := <-done:
		return ended.out, ended.err
	case <-time.After(r.patience):
	}
	r.count(key, 1)
	close(left)
	return capture.Output{}, errHangs
}

func (r *runner) mayRun(key string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.hung[key] < r.most
}

func (r *runner) count(key string, more int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.hung[key] += more; r.hung[key] == 0 {
		delete(r.hung, key)
	}
}

// runProgram runs an open program: by its descriptor, without a shell, with
// nothing of our environment, and for no longer than ctx.
func runProgram(ctx context.Context, kill func(group int) error, file *os.File, path string, words []string) (capture.Output, error) {
	cmd := exec.CommandContext(ctx, childProgram)
	cmd.Args = append([]string{path, abi.Word}, words...)
	cmd.ExtraFiles = []*os.File{file}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	// Kill its children as well. It is not reaped yet, so the number is still its own.
	cmd.Cancel = func() error { return kill(cmd.Process.Pid) }
	ran, err := capture.Run(cmd, (*exec.Cmd).Start, maxAnswer, maxComplaint)
	if ran.Signal != 0 {
		ran.Stderr = "it was ended by signal " + ran.Signal.String()
	}
	return ran, err
}
