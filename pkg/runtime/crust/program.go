package crust

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/crust-proxy/crust-proxy/internal/ground/capture"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

const (
	// childProgram is the path of the program in the child: os/exec passes the first extra
	// file as descriptor 3. So the file that was checked is executed, whatever has its name
	// now.
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
	defer closeFile(file)
	ended, err := runProgram(ctx, file, path, q.words)
	switch {
	case ctx.Err() != nil:
		return contextError(v, id, ctx.Err())
	case err != nil:
		return volume.Errorf(volume.Internal, "volume %s: the program %s of sandbox %s cannot be run: %w", v.Target, path, id, err)
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

// runProgram runs an open program: by its descriptor, without a shell, with
// nothing of our environment, and for no longer than ctx.
func runProgram(ctx context.Context, file *os.File, path string, words []string) (capture.Output, error) {
	cmd := exec.CommandContext(ctx, childProgram)
	cmd.Args = append([]string{path, abi.Word}, words...)
	cmd.ExtraFiles = []*os.File{file}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	// Kill its children as well. It is not reaped yet, so the number is still its own.
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGKILL) }
	ran, err := capture.Run(cmd, (*exec.Cmd).Start, maxAnswer, maxComplaint)
	if ran.Signal != 0 {
		ran.Stderr = "it was ended by signal " + ran.Signal.String()
	}
	return ran, err
}

// closeFile closes a file that nothing was written to.
func closeFile(file *os.File) { _ = file.Close() }
