package guest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// cgroup is the control group of a container, named by its id.
type cgroup string

func (g cgroup) file(name string) string { return filepath.Join("/sys/fs/cgroup", string(g), name) }

func (g cgroup) create(spec *specs.Spec) error {
	if err := os.Mkdir(g.file(""), 0o755); err != nil { //nolint:gosec // as the kernel's own are
		return fmt.Errorf("create a control group: %w", err)
	}
	resources := new(specs.LinuxResources)
	if spec.Linux != nil && spec.Linux.Resources != nil {
		resources = spec.Linux.Resources
	}
	for file, limit := range limitsOf(resources) {
		if err := os.WriteFile(g.file(file), []byte(limit), 0); err != nil {
			return fmt.Errorf("set the limit %s: %w", file, err)
		}
	}
	if err := g.limitDevices(resources.Devices); err != nil {
		return fmt.Errorf("limit its devices: %w", err)
	}
	return nil
}

// limitsOf returns the content of the group's files.
func limitsOf(resources *specs.LinuxResources) map[string]string {
	limits := make(map[string]string)
	set := func(file string, limit *int64, suffix string) {
		if limit != nil && *limit > 0 {
			limits[file] = strconv.FormatInt(*limit, 10) + suffix
		}
	}
	if resources.Memory != nil {
		set("memory.max", resources.Memory.Limit, "")
	}
	if resources.Pids != nil {
		set("pids.max", &resources.Pids.Limit, "")
	}
	if resources.CPU != nil && resources.CPU.Period != nil {
		set("cpu.max", resources.CPU.Quota, " "+strconv.FormatUint(*resources.CPU.Period, 10))
	}
	return limits
}

// signal sends a signal to all processes of the group.
func (g cgroup) signal(signal syscall.Signal) error {
	if signal == unix.SIGKILL {
		return os.WriteFile(g.file("cgroup.kill"), []byte("1"), 0)
	}
	raw, err := os.ReadFile(g.file("cgroup.procs"))
	if err != nil {
		return err
	}
	var errs []error
	for line := range strings.FieldsSeq(string(raw)) {
		pid, err := strconv.Atoi(line)
		if err == nil {
			err = unix.Kill(pid, signal)
		}
		if err != nil && !errors.Is(err, unix.ESRCH) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// oomKilled reports whether the OOM killer has killed a process of the group.
func (g cgroup) oomKilled() bool {
	raw, err := os.ReadFile(g.file("memory.events"))
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(raw)) {
		if count, is := strings.CutPrefix(strings.TrimSpace(line), "oom_kill "); is {
			return count != "0"
		}
	}
	return false
}

// remove removes the group. It waits until the last process has ended.
func (g cgroup) remove(ctx context.Context) error {
	err := retry(ctx, unix.EBUSY, func() error { return os.Remove(g.file("")) })
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("processes of the container still run: %w", err)
	}
	return nil
}
