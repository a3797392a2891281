package handler

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// mostUsers bounds how many users of the program an error names.
const mostUsers = 20

// unused refuses while containers run by this program: their runtime would find no
// program any more to exec into them, to kill and to delete them.
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

// usersOf lists who will call the program again: containerd's shims, by the options that
// lie in the directory in which they run, and conmon, which CRI-O and podman have for each
// container, by its command line. An error is one of reading /proc as a whole: a process
// may end at any time.
func usersOf(proc, program string) (users []string, err error) {
	entries, err := os.ReadDir(proc)
	if err != nil {
		return nil, err
	}
	for _, entry := range entries {
		dir := filepath.Join(proc, entry.Name())
		if strings.Trim(entry.Name(), "0123456789") != "" {
			continue
		}
		if id := shimsSandbox(dir, program); id != "" {
			users = append(users, fmt.Sprintf("sandbox %.64s (shim %s)", id, entry.Name()))
		} else if id := conmonsContainer(dir, program); id != "" {
			users = append(users, fmt.Sprintf("container %.64s (conmon %s)", id, entry.Name()))
		}
	}
	slices.Sort(users)
	return slices.Compact(users), nil
}

// shimsSandbox gives the sandbox of a shim of containerd that uses the program. Such a
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

// conmonsContainer gives the container of a conmon that uses the program.
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

// flagOf gives the value of a flag of a command line, or "".
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

// isProgram tells whether a configured runtime is the program: by its path, by another
// one that leads to it, or as a name in PATH.
func isProgram(configured, program string) bool {
	if configured == "" {
		return false
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
	return configured == program || oneErr == nil && otherErr == nil && os.SameFile(one, other)
}
