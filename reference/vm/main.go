// Package vm is the reference runtime handler for virtual machines: an OCI runtime, crust-vm, that runs a pod in a QEMU
// machine of its own and hands deferred volumes to the guest as disks, whose filesystems the guest's kernel mounts.
//
// A sandbox is a process, `crust-vm supervise`, with QEMU and virtiofsd as its children; none outlives the other. A
// container, and each further process of it, is a process `crust-vm attach` on the host, which carries its streams and
// ends as it ends. docs/crust-runc.md describes the rest.
package vm

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/reference/handler"
	"github.com/crust-proxy/crust-proxy/reference/process"
)

const name = "crust-vm"

// Main runs the program and returns its exit status.
func Main(args []string, stdout, stderr io.Writer) int {
	in := handler.ParseArgs(args[1:])
	report := handler.Reporter{Name: name, In: in, Stderr: stderr}
	first := ""
	if len(args) > 1 {
		first = strings.TrimLeft(args[1], "-")
	}
	switch {
	case in.Command == abi.Word:
		return volumeCommands.Main(args[2:], stdout, stderr)
	case first == "help", first == "h":
		return volumeCommands.Main([]string{"help"}, stdout, stderr)
	case in.Command == "features":
		_, _ = io.WriteString(stdout, features)
		return 0
	case first == "version", first == "v":
		sys.PrintVersion(stdout, name)
		_, _ = fmt.Fprintln(stdout, "spec: 1.0.2")
		return 0
	}
	cfg, err := LoadConfig(os.Getenv)
	if in.Command != "create" {
		err = handler.Tolerate(err)
	}
	if err != nil {
		report.Fail(err)
		return 1
	}
	if text := cfg.obsolete(); text != "" && in.Command == "create" { // once per container
		report.Warn(text)
	}
	code, err := (&command{cfg: cfg, in: in, report: report, stdout: stdout}).run()
	if err != nil {
		report.Fail(err)
		return max(code, 1)
	}
	return code
}

// volumeCommands are the commands that crust-proxy runs.
var volumeCommands = handler.CLI{
	Name: name, About: "crust-vm is an OCI runtime, started by containerd: each pod is a virtual machine, whose\n" +
		"kernel mounts the pod's deferred volumes.",
	Config: defaultConfig + ", or the file that " + configVariable + " names",
	Open: func() (handler.Volumes, string, error) {
		cfg, err := LoadConfig(os.Getenv)
		return supervisorVolumes{cfg}, cfg.Program, handler.Tolerate(err)
	},
}

// features is the output of `crust-vm features`, which container runtimes read.
const features = `{"ociVersionMin":"1.0.0","ociVersionMax":"1.2.0","hooks":[],` +
	`"mountOptions":["bind","rbind","ro","rw","nosuid","nodev","noexec","noatime","relatime","strictatime","private","rprivate","slave","rslave"],` +
	`"linux":{"namespaces":["mount","pid","uts","ipc"],"capabilities":[],"cgroup":{"v1":true,"v2":true,"systemd":false,"rootless":false},` +
	`"seccomp":{"enabled":false},"apparmor":{"enabled":false},"selinux":{"enabled":false},"mountExtensions":{"idmap":{"enabled":false}}}}
`

// The commands by which crust-vm starts itself.
const (
	superviseCommand = "supervise"
	attachCommand    = "attach"
)

func (c *command) run() (code int, err error) {
	commands := map[string]struct {
		words int
		run   func() error
	}{
		"create": {1, c.create}, "run": {1, c.unsupported}, "start": {1, c.start}, "state": {1, c.state},
		"kill": {1, c.kill}, "delete": {1, c.delete}, superviseCommand: {4, c.supervise},
	}
	switch c.in.Command {
	case "exec":
		return c.exec()
	case attachCommand:
		return c.attach()
	}
	command, known := commands[c.in.Command]
	if !known {
		return 1, c.unsupported()
	}
	if len(c.in.Words) < command.words {
		return 1, fmt.Errorf("%s: arguments are missing", c.in.Command)
	}
	return 0, command.run()
}

func (c *command) unsupported() error {
	if c.in.Command == "" {
		return errors.New("a command is missing; see `crust-vm --help`")
	}
	return fmt.Errorf("the command %q is not supported by crust-vm; see `crust-vm --help`", c.in.Command)
}

func (c *command) supervise() error {
	words := c.in.Words
	pid, errPID := strconv.Atoi(words[2])
	start, errStart := strconv.ParseUint(words[3], 10, 64)
	if err := errors.Join(errPID, errStart); err != nil {
		return err
	}
	const readyFD = 3
	syscall.CloseOnExec(readyFD)
	// Do not inherit the umask of the container runtime.
	unix.Umask(0o022)
	return supervise(c.cfg, words[0], words[1], process.Process{PID: pid, Start: start}, os.NewFile(readyFD, "ready"))
}
