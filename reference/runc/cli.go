package runc

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strconv"
	"time"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
)

const crustUsage = `crust-runc is runc that mounts deferred volumes in the sandbox of their pod.
Every other command is runc's. Its own commands answer about a volume, named by
its resolved target path, in JSON:

  crust-runc crust stats  TARGET
  crust-runc crust resize TARGET MIN-BYTES MAX-BYTES    (0 is none)
  crust-runc crust freeze TARGET SECONDS
  crust-runc crust thaw   TARGET
  crust-runc crust thaw-expired    (every volume whose time is over)

  crust-runc crust removable       (fails while containers run by this program)

Exit status: 0 done, 1 refused, 2 bad arguments, 3 no live sandbox has the
volume, 4 not supported, 5 out of range.
Configuration: ` + defaultConfig + `, or the file that ` + configVariable + ` names.
`

// errUsage is a command line that cannot be meant.
var errUsage = errors.New("bad arguments; see `crust-runc crust help`")

// crustMain runs a command of our own.
func crustMain(args []string, stdout, stderr io.Writer) int {
	if len(args) == 1 && (args[0] == "help" || args[0] == "--help" || args[0] == "-h") {
		_, _ = io.WriteString(stdout, crustUsage)
		return abi.ExitOK
	}
	err := crustCommand(args, stdout)
	if err != nil {
		_, _ = fmt.Fprintln(stderr, "crust-runc:", err)
	}
	return ExitStatus(err)
}

func crustCommand(args []string, stdout io.Writer) error {
	if len(args) == 0 {
		return errUsage
	}
	command, args := args[0], args[1:]
	if wanted, known := argumentCount[command]; !known || len(args) != wanted {
		return errUsage
	}
	if command == commandWatch {
		return fsops.Watch(args) // it has all that it needs, and an empty environment
	}
	cfg, err := LoadConfig(os.Getenv)
	if err != nil {
		return err
	}
	if command == commandRemovable {
		return removable("/proc", cfg.Program)
	}
	if command == abi.ThawExpired {
		return json.NewEncoder(stdout).Encode(Volumes{cfg: cfg}.ThawExpired())
	}
	answer, err := askVolume(Volumes{cfg: cfg}, command, args)
	if err != nil {
		return err
	}
	return json.NewEncoder(stdout).Encode(answer)
}

var argumentCount = map[string]int{
	abi.Stats: 1, abi.Resize: 3, abi.Freeze: 2, abi.Thaw: 1, abi.ThawExpired: 0, commandWatch: 3, commandRemovable: 0,
}

func askVolume(v Volumes, command string, args []string) (any, error) {
	target := args[0]
	if !path.IsAbs(target) {
		return nil, fmt.Errorf("%w: the target %q is not an absolute path", errUsage, target)
	}
	numbers, err := readNumbers(args[1:])
	if err != nil {
		return nil, err
	}
	switch command {
	case abi.Stats:
		reply, _, err := v.Stats(target)
		return reply, err
	case abi.Resize:
		size, err := v.Resize(target, numbers[0], numbers[1])
		return abi.ResizeReply{CapacityBytes: size}, err
	case abi.Freeze:
		return struct{}{}, v.Freeze(target, time.Duration(numbers[0])*time.Second)
	default:
		return struct{}{}, v.Thaw(target)
	}
}

func readNumbers(args []string) ([]int64, error) {
	var numbers []int64
	for _, arg := range args {
		n, err := strconv.ParseInt(arg, 10, 64)
		if err != nil || n < 0 {
			return nil, fmt.Errorf("%w: %q is not a number of 0 or more", errUsage, arg)
		}
		numbers = append(numbers, n)
	}
	return numbers, nil
}

// ExitStatus is how the program ends with an error, and so says of which kind it is.
func ExitStatus(err error) int {
	switch {
	case err == nil:
		return abi.ExitOK
	case errors.Is(err, errUsage):
		return abi.ExitUsage
	case errors.Is(err, errNoSandbox), errors.Is(err, errGone):
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
