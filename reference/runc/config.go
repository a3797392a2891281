package runc

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/reference/handler"
)

// Config is where things are on the node. It is read at every start, from a small
// JSON file that need not exist.
type Config struct {
	// Runtime is the OCI runtime that does the work; unless set, the first runc in
	// PATH.
	Runtime string `json:"runtime"`
	// Root holds the directories of volumes.
	Root string `json:"root"`
	// StateDir holds the agent's socket and what is frozen.
	StateDir string `json:"stateDir"`
	// Program is the path of this program that the broker is told to run.
	Program string `json:"program"`
	// Agent is false to start no agent; every question then starts a program.
	Agent bool `json:"agent"`
	// AgentProgram is the agent's path; unless set, it is beside this program.
	AgentProgram string `json:"agentProgram"`
}

const (
	configVariable = "CRUST_RUNC_CONFIG"
	defaultConfig  = "/etc/crust-proxy/crust-runc.json"
)

// LoadConfig reads the configuration. Unknown keys are errors.
func LoadConfig(getenv func(string) string) (Config, error) {
	cfg := Config{Root: abi.DefaultRoot, StateDir: "/run/crust-runc", Agent: true}
	file, err := handler.ReadConfig(getenv(configVariable), defaultConfig, &cfg)
	if err != nil {
		return Config{}, err
	}
	return cfg, cfg.complete(file)
}

func (c *Config) complete(file string) (err error) {
	if c.Program, err = handler.OwnProgram(c.Program); err != nil {
		return err
	}
	if c.AgentProgram == "" {
		c.AgentProgram = filepath.Join(filepath.Dir(c.Program), "crust-runc-agent")
	}
	return handler.CheckPaths(file, map[string]string{
		"root": c.Root, "stateDir": c.StateDir, "program": c.Program, "agentProgram": c.AgentProgram, "runtime": c.Runtime,
	})
}

// runtime is the path of runc.
func (c Config) runtime() (string, error) {
	path := c.Runtime
	if path == "" {
		found, err := exec.LookPath("runc")
		if err != nil {
			return "", fmt.Errorf("runc is not in PATH (%q): install it, or set \"runtime\" in %s: %w", os.Getenv("PATH"), defaultConfig, err)
		}
		path = found
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

// AgentSocket is where the agent answers.
func (c Config) AgentSocket() string { return filepath.Join(c.StateDir, "agent.sock") }
