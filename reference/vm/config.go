package vm

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"time"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/reference/handler"
)

// Config is where things are on the node. It is read at every start, from a small
// JSON file.
type Config struct {
	// Kernel is a directory with boot/vmlinuz-* and lib/modules of one kernel, as the
	// package of a distribution's kernel has them.
	Kernel string `json:"kernel"`
	// QEMU and Virtiofsd are the programs. Where Virtiofsd is empty, a machine is shown copies
	// of root filesystems and of what is mounted in them.
	QEMU      string `json:"qemu"`
	Virtiofsd string `json:"virtiofsd"`
	// Accel is "kvm" or "tcg", or "" to take KVM where a guest runs by it.
	Accel string `json:"accel"`
	// MemoryMiB and CPUs are what each virtual machine has.
	MemoryMiB int `json:"memoryMiB"`
	CPUs      int `json:"cpus"`
	// BootTimeoutSeconds is how long a machine may take to its agent's first word.
	BootTimeoutSeconds int `json:"bootTimeoutSeconds"`
	// HangTimeoutSeconds is how long an agent may answer no ping, or a killed container not
	// end, before the machine is killed.
	HangTimeoutSeconds int `json:"hangTimeoutSeconds"`
	// FirstUser is the first of the users that the machines have, each its own: four
	// million numbers that nobody else uses.
	FirstUser uint32 `json:"firstUser"`
	// Root holds the directories of volumes, StateDir those of sandboxes.
	Root     string `json:"root"`
	StateDir string `json:"stateDir"`
	// ImageDir holds the copies, by no name; empty is in memory, below StateDir. MaxImageMiB
	// bounds each.
	ImageDir    string `json:"imageDir"`
	MaxImageMiB int    `json:"maxImageMiB"`
	// Program is the path of this program that the broker is told to run, and
	// AgentProgram that of the guest's; unless set, it is beside this program.
	Program      string `json:"program"`
	AgentProgram string `json:"agentProgram"`

	// file is where all this is configured.
	file string
}

const (
	configVariable = "CRUST_VM_CONFIG"
	defaultConfig  = "/etc/crust-proxy/crust-vm.json"
	// defaultVirtiofsd is taken where it is.
	defaultVirtiofsd = "/usr/lib/qemu/virtiofsd"
)

// LoadConfig reads the configuration. Unknown keys are errors.
func LoadConfig(getenv func(string) string) (Config, error) {
	cfg := Config{
		Kernel: "/usr/lib/crust-vm/kernel", QEMU: "/usr/bin/qemu-system-x86_64", Virtiofsd: defaultVirtiofsd,
		MemoryMiB: 512, CPUs: 1, BootTimeoutSeconds: 120, HangTimeoutSeconds: 90, FirstUser: 1_900_000_000,
		Root: abi.DefaultRoot, StateDir: "/run/crust-vm", MaxImageMiB: 4096,
	}
	if _, err := os.Stat(defaultVirtiofsd); errors.Is(err, os.ErrNotExist) {
		cfg.Virtiofsd = ""
	}
	file, err := handler.ReadConfig(getenv(configVariable), defaultConfig, &cfg)
	if err != nil {
		return Config{}, err
	}
	cfg.file = file
	return cfg, cfg.complete()
}

func (c *Config) complete() (err error) {
	if c.Program, err = handler.OwnProgram(c.Program); err != nil {
		return err
	}
	if c.ImageDir == "" {
		c.ImageDir = filepath.Join(c.StateDir, ".images")
	}
	if c.AgentProgram == "" {
		c.AgentProgram = filepath.Join(filepath.Dir(c.Program), "crust-vm-agent")
	}
	if c.MemoryMiB < 128 || c.CPUs < 1 || c.BootTimeoutSeconds < 1 || c.HangTimeoutSeconds < 1 || c.MaxImageMiB < 1 {
		return fmt.Errorf("the configuration %s: memoryMiB must be 128 or more, cpus, bootTimeoutSeconds, hangTimeoutSeconds and maxImageMiB 1 or more", c.file)
	}
	if c.FirstUser == 0 || c.FirstUser > math.MaxUint32-users {
		return fmt.Errorf("the configuration %s: firstUser must be 1 to %d", c.file, uint32(math.MaxUint32-users))
	}
	if c.Accel != "" && c.Accel != accelKVM && c.Accel != accelTCG {
		return fmt.Errorf("the configuration %s: accel: %q is neither kvm nor tcg", c.file, c.Accel)
	}
	return handler.CheckPaths(c.file, map[string]string{
		"kernel": c.Kernel, "qemu": c.QEMU, "virtiofsd": c.Virtiofsd, "root": c.Root, "stateDir": c.StateDir, "imageDir": c.ImageDir,
		"program": c.Program, "agentProgram": c.AgentProgram,
	})
}

// users is how many users the machines have: as many as there can be processes.
const users = 1 << 22

// check sees that what a machine is made of is there.
func (c Config) check() error {
	var errs []error
	for _, part := range []struct{ key, path string }{
		{"kernel", c.Kernel}, {"qemu", c.QEMU}, {"virtiofsd", c.Virtiofsd}, {"agentProgram", c.AgentProgram},
	} {
		if part.path == "" && part.key == "virtiofsd" {
			continue
		}
		if _, err := os.Stat(part.path); err != nil {
			errs = append(errs, fmt.Errorf("%w: install it, or set %q in %s", err, part.key, c.file))
		}
	}
	if _, err := os.Stat(mkfs); err != nil && c.Virtiofsd == "" {
		errs = append(errs, fmt.Errorf("%w: without virtiofsd, e2fsprogs is needed", err))
	}
	return errors.Join(errs...)
}

const accelKVM, accelTCG = "kvm", "tcg"

func (c Config) bootTime() time.Duration { return time.Duration(c.BootTimeoutSeconds) * time.Second }

func (c Config) hangTime() time.Duration { return time.Duration(c.HangTimeoutSeconds) * time.Second }

// pingTime is the time between two pings, and that for the answer to each.
func (c Config) pingTime() time.Duration { return c.hangTime() / (2 * maxFailedPings) }

// cache is for what all sandboxes can use. No sandbox has such a name.
func (c Config) cache() string { return filepath.Join(c.StateDir, ".cache") }

// sandbox is the directory of a sandbox.
func (c Config) sandbox(id string) place { return place(filepath.Join(c.StateDir, id)) }
