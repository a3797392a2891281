package handler

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
	"github.com/crust-proxy/crust-proxy/reference/process"
)

// Volumes are the operations on volumes in sandboxes.
type Volumes interface {
	// Stats measures the filesystem now, and returns the sandbox that answered.
	Stats(target string) (reply abi.StatsReply, sandbox string, err error)
	// Resize makes the filesystem as large as its device, and returns that size.
	Resize(target string, least, most int64) (int64, error)
	// Freeze blocks all writes until Thaw, or until the timeout.
	Freeze(target string, timeout time.Duration) error
	// Thaw ends a freeze.
	Thaw(target string) error
	// ThawExpired thaws volumes that are frozen although their time is over.
	ThawExpired() abi.ThawExpiredReply
}

// CLI is a program's commands about volumes.
type CLI struct {
	// Name, About and Config are the name, description and configuration file for the help.
	Name, About, Config string
	// Open returns the volumes and the path of the program.
	Open func() (volumes Volumes, program string, err error)
}

const usage = `%[2]s
Its commands about volumes answer in JSON; a volume is named by its resolved
target path:

  %[1]s crust stats  TARGET
  %[1]s crust resize TARGET MIN-BYTES MAX-BYTES    (0 is none)
  %[1]s crust freeze TARGET SECONDS
  %[1]s crust thaw   TARGET
  %[1]s crust thaw-expired    (every volume whose time is over)

  %[1]s crust removable       (fails while containers run by this program)

Exit status: 0 done, 1 refused, 2 bad arguments, 3 no live sandbox has the
volume, 4 not supported, 5 out of range, 6 frozen already, or not frozen.
Configuration: %[3]s.
`

// The kinds of errors that have an exit status of their own.
var (
	// ErrUsage: the command line is invalid.
	ErrUsage = errors.New("bad arguments")
	// ErrNoSandbox: no live sandbox has the volume.
	ErrNoSandbox = errors.New("no live sandbox has the volume mounted")
)

// Main runs a command about volumes and returns its exit status.
func (c CLI) Main(args []string, stdout, stderr io.Writer) int {
	if len(args) == 1 && (args[0] == "help" || args[0] == "--help" || args[0] == "-h") {
		_, _ = fmt.Fprintf(stdout, usage, c.Name, c.About, c.Config)
		return abi.ExitOK
	}
	err := c.command(args, stdout)
	if errors.Is(err, ErrUsage) {
		err = fmt.Errorf("%w; see `%s crust help`", err, c.Name)
	}
	if err != nil {
		_, _ = fmt.Fprintf(stderr, "%s: %v\n", c.Name, err)
	}
	return ExitStatus(err)
}

// removable is the command that checks whether this program can be removed from the node.
const removable = "removable"

var argumentCount = map[string]int{
	abi.Stats: 1, abi.Resize: 3, abi.Freeze: 2, abi.Thaw: 1, abi.ThawExpired: 0, removable: 0,
}

func (c CLI) command(args []string, stdout io.Writer) error {
	if len(args) == 0 {
		return fmt.Errorf("%w: a command is missing", ErrUsage)
	}
	command, args := args[0], args[1:]
	switch wanted, known := argumentCount[command]; {
	case !known:
		return fmt.Errorf("%w: there is no command %q", ErrUsage, command)
	case len(args) != wanted:
		return fmt.Errorf("%w: %s takes %d, not %d", ErrUsage, command, wanted, len(args))
	}
	volumes, program, err := c.Open()
	if err != nil {
		return err
	}
	if command == removable && os.Geteuid() != 0 {
		return errors.New("only root sees whose containers run: run it as root")
	}
	if command == removable {
		return unused("/proc", program)
	}
	if command == abi.ThawExpired {
		return json.NewEncoder(stdout).Encode(volumes.ThawExpired())
	}
	answer, err := askVolume(volumes, command, args)
	if err != nil {
		return err
	}
	return json.NewEncoder(stdout).Encode(answer)
}

func askVolume(v Volumes, command string, args []string) (any, error) {
	target := args[0]
	if !path.IsAbs(target) {
		return nil, fmt.Errorf("%w: the target %q is not an absolute path", ErrUsage, target)
	}
	var numbers []int64
	for _, arg := range args[1:] {
		n, err := strconv.ParseInt(arg, 10, 64)
		if err != nil || n < 0 {
			return nil, fmt.Errorf("%w: %q is not a number of 0 or more", ErrUsage, arg)
		}
		numbers = append(numbers, n)
	}
	switch command {
	case abi.Stats:
		reply, _, err := v.Stats(target)
		return reply, err
	case abi.Resize:
		size, err := v.Resize(target, numbers[0], numbers[1])
		return abi.ResizeReply{CapacityBytes: size}, err
	case abi.Freeze:
		// A time.Duration overflows: pass its largest value, which the volumes refuse.
		seconds := min(numbers[0], int64(math.MaxInt64/time.Second))
		return struct{}{}, v.Freeze(target, time.Duration(seconds)*time.Second)
	default:
		return struct{}{}, v.Thaw(target)
	}
}

// ExitStatus returns the exit status for a kind of error.
func ExitStatus(err error) int {
	switch {
	case err == nil:
		return abi.ExitOK
	case errors.Is(err, ErrUsage):
		return abi.ExitUsage
	case errors.Is(err, ErrNoSandbox), errors.Is(err, process.ErrEnded):
		return abi.ExitNoSandbox
	case errors.Is(err, fsops.ErrUnsupported), errors.Is(err, fsops.ErrDenied):
		return abi.ExitUnsupported
	case errors.Is(err, fsops.ErrOutOfRange):
		return abi.ExitOutOfRange
	case errors.Is(err, fsops.ErrFrozen), errors.Is(err, fsops.ErrNotFrozen):
		return abi.ExitWrongState
	default:
		return abi.ExitRefused
	}
}

// mostUsers bounds the number of users of the program in an error.
const mostUsers = 20

// unused fails while containers run under this program: without it their runtime could not
// exec into them, kill or delete them.
func unused(proc, program string) error {
	users, err := usersOf(proc, program)
	if err != nil {
		return fmt.Errorf("it cannot be told whether containers run by %s: %w", program, err)
	}
	if len(users) == 0 {
		return nil
	}
	named := users[:min(len(users), mostUsers)]
	text := strings.Join(named, ", ")
	if more := len(users) - len(named); more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return fmt.Errorf("containers run by %s: %s: without it nobody can exec into them, kill them and delete them: "+
		"delete their pods, or drain the node, and try again", program, text)
}

// usersOf lists the processes that will call the program again: containerd's shims, by the options file in their
// working directory, and conmon, which CRI-O and podman run for each container, by its command line. A process may end
// at any time: only an error of reading /proc as a whole is returned.
func usersOf(proc, program string) (users []string, err error) {
	entries, err := os.ReadDir(proc)
	if err != nil {
		return nil, err
	}
	for _, entry := range entries {
		dir := filepath.Join(proc, entry.Name())
		if strings.Trim(entry.Name(), "0123456789") != "" || !isOwn(proc, dir, 0) {
			continue
		}
		if id := shimsSandbox(dir, program); id != "" {
			users = append(users, fmt.Sprintf("sandbox %.64q (shim %s)", id, entry.Name()))
		} else if id := conmonsContainer(dir, program); id != "" {
			users = append(users, fmt.Sprintf("container %.64q (conmon %s)", id, entry.Name()))
		}
	}
	slices.Sort(users)
	return slices.Compact(users), nil
}

// isOwn reports whether a process is a user's and in no container, or that cannot be found out. Others could look like
// root's shim on purpose. containerd may have a mount namespace of its own, but not one of processes.
func isOwn(proc, dir string, uid int) bool {
	status, err := os.ReadFile(dir + "/status") //nolint:gosec // root asks about the node's own processes
	isUsers := err != nil || bytes.Contains(status, fmt.Appendf(nil, "\nUid:\t%d\t", uid))
	own, ownErr := os.Readlink(proc + "/self/ns/pid")
	its, itsErr := os.Readlink(dir + "/ns/pid")
	return isUsers && (its == own || ownErr != nil || itsErr != nil)
}

// shimsSandbox returns the sandbox of a containerd shim that uses the program, or "". The
// shim runs in the bundle of its sandbox.
func shimsSandbox(dir, program string) string {
	raw, err := sys.ReadSmall(dir+"/cwd/options.json", 64<<10)
	if err != nil {
		return ""
	}
	var options struct {
		Program string `json:"binary_name"`
	}
	if json.Unmarshal(raw, &options) != nil || !isProgram(options.Program, program) {
		return ""
	}
	bundle, err := os.Readlink(dir + "/cwd")
	if err != nil {
		return ""
	}
	return filepath.Base(bundle)
}

// conmonsContainer returns the container of a conmon that uses the program, or "".
func conmonsContainer(dir, program string) string {
	raw, err := os.ReadFile(dir + "/cmdline") //nolint:gosec // root asks about the node's own processes
	if err != nil {
		return ""
	}
	args := strings.Split(strings.TrimSuffix(string(raw), "\x00"), "\x00")
	if !strings.HasPrefix(filepath.Base(args[0]), "conmon") || !isProgram(flagOf(args, "-r", "--runtime"), program) {
		return ""
	}
	if id := flagOf(args, "-c", "--cid"); id != "" {
		return id
	}
	return "of unknown id"
}

// flagOf returns the value of a flag of a command line, or "".
func flagOf(args []string, short, long string) string {
	for i, arg := range args {
		if value, ok := strings.CutPrefix(arg, long+"="); ok {
			return value
		}
		if (arg == short || arg == long) && i+1 < len(args) {
			return args[i+1]
		}
	}
	return ""
}

// isProgram reports whether a configured runtime is the program: by its path, by a link to it, or by name in PATH.
func isProgram(configured, program string) bool {
	if configured == "" || configured == program {
		return configured != ""
	}
	if !filepath.IsAbs(configured) {
		found, err := exec.LookPath(configured)
		if err != nil {
			return configured == filepath.Base(program)
		}
		configured = found
	}
	one, oneErr := os.Stat(configured) //nolint:gosec // only compared
	other, otherErr := os.Stat(program)
	return oneErr == nil && otherErr == nil && os.SameFile(one, other)
}
