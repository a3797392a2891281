package vm

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"time"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/reference/handler"
)

// Config is the configuration, a small JSON file that every command reads. docs/crust-runc.md has what its keys mean.
type Config struct {
	Kernel             string `json:"kernel"`
	QEMU               string `json:"qemu"`
	Virtiofsd          string `json:"virtiofsd"`
	Accel              string `json:"accel"` // if it is empty, a trial decides whether KVM works
	MemoryMiB          int    `json:"memoryMiB"`
	CPUs               int    `json:"cpus"`
	BootTimeoutSeconds int    `json:"bootTimeoutSeconds"`
	HangTimeoutSeconds int    `json:"hangTimeoutSeconds"`
	FirstUser          uint32 `json:"firstUser"` // of `users` ids
	Root               string `json:"root"`
	StateDir           string `json:"stateDir"`
	Program            string `json:"program"`
	AgentProgram       string `json:"agentProgram"`
	// ImageDir and MaxImageMiB were keys of earlier versions, and are ignored: machines that run
	// during an upgrade are still to be ended.
	ImageDir    any `json:"imageDir"`
	MaxImageMiB any `json:"maxImageMiB"`

	file string // the path of the configuration file
}

const (
	configVariable = "CRUST_VM_CONFIG"
	defaultConfig  = "/etc/crust-proxy/crust-vm.json"
)

// virtiofsds are where distributions have virtiofsd: Debian and its children, and others.
var virtiofsds = []string{"/usr/lib/qemu/virtiofsd", "/usr/libexec/virtiofsd", "/usr/lib/virtiofsd"}

// LoadConfig reads the configuration. Unknown keys are errors.
func LoadConfig(getenv func(string) string) (Config, error) {
	cfg := Config{
		Kernel: "/usr/lib/crust-vm/kernel", QEMU: "/usr/bin/qemu-system-x86_64", Virtiofsd: virtiofsds[0],
		MemoryMiB: 512, CPUs: 1, BootTimeoutSeconds: 120, HangTimeoutSeconds: 90, FirstUser: 1_900_000_000,
		Root: abi.DefaultRoot, StateDir: "/run/crust-vm",
	}
	for _, path := range virtiofsds {
		if _, err := os.Stat(path); err == nil {
			cfg.Virtiofsd = path
			break
		}
	}
	err := handler.ReadConfig(getenv(configVariable), defaultConfig, &cfg, cfg.complete)
	return cfg, err
}

func (c *Config) complete(file string) (err error) {
	c.file = file
	if c.Program, err = handler.OwnProgram(c.Program); err != nil {
		return err
	}
	c.AgentProgram = cmp.Or(c.AgentProgram, filepath.Join(filepath.Dir(c.Program), "crust-vm-agent"))
	if c.MemoryMiB < 128 || c.CPUs < 1 || c.BootTimeoutSeconds < 1 || c.HangTimeoutSeconds < 1 {
		return fmt.Errorf("the configuration %s: memoryMiB must be 128 or more, cpus, bootTimeoutSeconds and hangTimeoutSeconds 1 or more", c.file)
	}
	if c.FirstUser == 0 || c.FirstUser > math.MaxUint32-users {
		return fmt.Errorf("the configuration %s: firstUser must be 1 to %d", c.file, uint32(math.MaxUint32-users))
	}
	if c.Accel != "" && c.Accel != accelKVM && c.Accel != accelTCG {
		return fmt.Errorf("the configuration %s: accel: %q is neither kvm nor tcg", c.file, c.Accel)
	}
	return handler.CheckPaths(c.file, map[string]string{
		"kernel": c.Kernel, "qemu": c.QEMU, "virtiofsd": c.Virtiofsd, "root": c.Root, "stateDir": c.StateDir,
		"program": c.Program, "agentProgram": c.AgentProgram,
	})
}

// obsolete is a warning about keys that are ignored, or empty.
func (c *Config) obsolete() string {
	if c.ImageDir == nil && c.MaxImageMiB == nil {
		return ""
	}
	return fmt.Sprintf("the configuration %s: imageDir and maxImageMiB have no effect any more: remove them", c.file)
}

// users is how many user ids the machines use: one for each possible pid.
const users = 1 << 22

// check checks that the parts of a machine are installed.
func (c Config) check() error {
	var errs []error
	for _, part := range []struct{ key, path string }{
		{"kernel", c.Kernel}, {"qemu", c.QEMU}, {"virtiofsd", c.Virtiofsd}, {"agentProgram", c.AgentProgram},
	} {
		if _, err := os.Stat(part.path); err != nil {
			errs = append(errs, fmt.Errorf("%w: install it, or set %q in %s", err, part.key, c.file))
		}
	}
	return errors.Join(errs...)
}

const accelKVM, accelTCG = "kvm", "tcg"

func (c Config) bootTime() time.Duration { return time.Duration(c.BootTimeoutSeconds) * time.Second }

func (c Config) hangTime() time.Duration { return time.Duration(c.HangTimeoutSeconds) * time.Second }

// pingTime is the time between two pings, and the timeout of each.
func (c Config) pingTime() time.Duration { return c.hangTime() / (2 * maxFailedPings) }

// cache is a directory that all sandboxes share. No sandbox can have this name.
func (c Config) cache() string { return filepath.Join(c.StateDir, ".cache") }

func (c Config) sandbox(id string) sandboxDir { return sandboxDir(filepath.Join(c.StateDir, id)) }
