// Package runc is the reference runtime handler: an OCI runtime that mounts the deferred volumes of a container in the
// sandbox's mount namespace, and then becomes runc. docs/crust-runc.md describes how, and why.
package runc

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"syscall"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
	"github.com/crust-proxy/crust-proxy/reference/handler"
)

const name = "crust-runc"

// Main runs the program and returns its exit status. If it becomes runc, it does not return.
func Main(args []string, stdout, stderr io.Writer) int {
	// runc gets the mount namespace of the thread that calls exec.
	runtime.LockOSThread()
	if len(args) > 1 && args[1] == abi.Word {
		return crustMain(args[2:], stdout, stderr)
	}
	in := handler.ParseArgs(args[1:])
	report := handler.Reporter{Name: name, In: in, Stderr: stderr}
	cfg, err := LoadConfig(os.Getenv)
	creates := slices.Contains([]string{"create", "run", "restore"}, in.Command) // runc sets up mounts
	if !creates {
		err = handler.Tolerate(err)
	}
	path := ""
	if err == nil {
		path, err = cfg.runtime()
	}
	if err != nil {
		report.Fail(err)
		return 1
	}
	if slices.Equal(args[1:], []string{"--version"}) {
		return printVersions(path, stdout, stderr)
	}
	switch {
	case creates:
		err = (&creator{cfg: cfg, runtime: path, in: in, report: report}).prepare()
	case in.Command == "delete":
		if err = endUnstarted(path, in); err != nil && in.Has("force", "f") {
			// containerd deletes by force once, after a shim has died: what can be ended ends all the same.
			cmd := exec.Command(path, args[1:]...) //nolint:gosec // the operator's runc
			cmd.Stdout, cmd.Stderr = stdout, stderr
			err = errors.Join(err, cmd.Run())
		}
	}
	if err != nil {
		report.Fail(err)
		return 1
	}
	// runc keeps the PID, descriptors, terminal and signals of this process.
	err = syscall.Exec(path, append([]string{path}, args[1:]...), os.Environ()) //nolint:gosec // the operator's runc
	report.Fail(fmt.Errorf("%s cannot be run: %w", path, err))
	return 1
}

// printVersions prints runc's version first, for that is what programs read, and then our own.
func printVersions(path string, stdout, stderr io.Writer) int {
	cmd := exec.Command(path, "--version")
	cmd.Stdout, cmd.Stderr = stdout, stderr
	err := cmd.Run()
	sys.PrintVersion(stdout, name)
	return handler.ExitStatus(err)
}

// crustMain runs one of our own commands.
func crustMain(args []string, stdout, stderr io.Writer) int {
	if len(args) == 4 && args[0] == commandWatch {
		err := fsops.Watch(args[1:]) // it has all that it needs, and an empty environment
		if err != nil {
			_, _ = fmt.Fprintf(stderr, "%s: %v\n", name, err)
		}
		return handler.ExitStatus(err)
	}
	if len(args) == 6 && args[0] == commandGroup {
		return groupMain(args[1:], stderr)
	}
	return handler.CLI{
		Name: name, About: "crust-runc is runc that mounts deferred volumes in the sandbox of their pod.",
		Config: defaultConfig + ", or the file that " + configVariable + " names",
		Open: func() (handler.Volumes, string, error) {
			cfg, err := LoadConfig(os.Getenv)
			return OpenVolumes(cfg), cfg.Program, handler.Tolerate(err)
		},
	}.Main(args, stdout, stderr)
}

// Config is the configuration of a node, a JSON file that may be missing and that every start reads. docs/crust-runc.md
// has what its keys mean.
type Config struct {
	Runtime      string `json:"runtime"`
	Root         string `json:"root"`
	StateDir     string `json:"stateDir"`
	Program      string `json:"program"`
	Agent        bool   `json:"agent"`
	AgentProgram string `json:"agentProgram"`
}

const (
	configVariable = "CRUST_RUNC_CONFIG"
	defaultConfig  = "/etc/crust-proxy/crust-runc.json"
)

// LoadConfig reads the configuration. Its error for an unknown key may be tolerated.
func LoadConfig(getenv func(string) string) (Config, error) {
	cfg := Config{Root: abi.DefaultRoot, StateDir: "/run/crust-runc", Agent: true}
	err := handler.ReadConfig(getenv(configVariable), defaultConfig, &cfg, cfg.complete)
	return cfg, err
}

func (c *Config) complete(file string) (err error) {
	if c.Program, err = handler.OwnProgram(c.Program); err != nil {
		return err
	}
	c.AgentProgram = cmp.Or(c.AgentProgram, filepath.Join(filepath.Dir(c.Program), "crust-runc-agent"))
	return handler.CheckPaths(file, map[string]string{
		"root": c.Root, "stateDir": c.StateDir, "program": c.Program, "agentProgram": c.AgentProgram, "runtime": c.Runtime,
	})
}

func (c Config) runtime() (string, error) {
	path, err := c.Runtime, error(nil)
	if path == "" {
		if path, err = exec.LookPath("runc"); err != nil {
			return "", fmt.Errorf("runc is not in PATH (%q): install it, or set \"runtime\" in %s: %w", os.Getenv("PATH"), defaultConfig, err)
		}
	}
	self, err := os.Stat("/proc/self/exe")
	if err != nil {
		return "", err
	}
	if other, err := os.Stat(path); err == nil && os.SameFile(self, other) {
		return "", fmt.Errorf("%s is crust-runc itself: set \"runtime\" in %s to the real runc", path, defaultConfig)
	}
	return path, nil
}

// AgentSocket is the path of the agent's socket.
func (c Config) AgentSocket() string { return filepath.Join(c.StateDir, "agent.sock") }
