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

// cgroup is the control group of a container, by its id.
type cgroup string

func (g cgroup) file(name string) string { return filepath.Join("/sys/fs/cgroup", string(g), name) }

// make makes it, with the limits that a spec has.
func (g cgroup) make(spec *specs.Spec) error {
	if err := os.Mkdir(g.file(""), 0o755); err != nil { //nolint:gosec // as the kernel's own are
		return fmt.Errorf("make a control group: %w", err)
	}
	has := new(specs.LinuxResources)
	if spec.Linux != nil && spec.Linux.Resources != nil {
		has = spec.Linux.Resources
	}
	for file, limit := range limitsOf(has) {
		if err := os.WriteFile(g.file(file), []byte(limit), 0); err != nil {
			return fmt.Errorf("set the limit %s: %w", file, err)
		}
	}
	if err := g.limitDevices(has.Devices); err != nil {
		return fmt.Errorf("limit its devices: %w", err)
	}
	return nil
}

// limitsOf gives limits by the files that they are written to.
func limitsOf(has *specs.LinuxResources) map[string]string {
	limits := make(map[string]string)
	set := func(file string, limit *int64, more string) {
		if limit != nil && *limit > 0 {
			limits[file] = strconv.FormatInt(*limit, 10) + more
		}
	}
	if has.Memory != nil {
		set("memory.max", has.Memory.Limit, "")
	}
	if has.Pids != nil {
		set("pids.max", &has.Pids.Limit, "")
	}
	if has.CPU != nil && has.CPU.Period != nil {
		set("cpu.max", has.CPU.Quota, " "+strconv.FormatUint(*has.CPU.Period, 10))
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

// oomKilled tells whether a process of the group was killed because memory was short.
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

// remove removes the group, when its last process has gone.
func (g cgroup) remove(ctx context.Context) error {
	err := retry(ctx, unix.EBUSY, func() error { return os.Remove(g.file("")) })
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("processes of the container are left: %w", err)
	}
	return nil
}
