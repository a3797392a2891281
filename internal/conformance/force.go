package conformance

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// removeByForce removes a container, whatever has become of it.
func (c *container) removeByForce(ctx context.Context) error {
	_, err := c.n.must(ctx, "delete", "--force", c.id)
	// One whose create was killed is known to nobody any more: its control groups
	// are left, and perhaps a process that waits in them.
	for _, pattern := range []string{"/sys/fs/cgroup/", "/sys/fs/cgroup/*/"} {
		groups, globErr := filepath.Glob(pattern + c.id)
		err = errors.Join(err, globErr)
		for _, group := range groups {
			err = errors.Join(err, eventually(ctx, endsWithin, func(context.Context) error { return removeGroup(group) }))
		}
	}
	return err
}

func removeGroup(group string) error {
	err := unix.Rmdir(group)
	switch {
	case err == nil, errors.Is(err, unix.ENOENT):
		return nil
	case errors.Is(err, unix.EBUSY):
		err = errors.Join(err, killGroup(group))
	}
	return fmt.Errorf("remove the control group %s: %w", group, err)
}

// killGroup kills what is in a control group.
func killGroup(group string) error {
	raw, err := os.ReadFile(filepath.Join(group, "cgroup.procs")) //nolint:gosec // a group of ours
	if err != nil {
		return err
	}
	for _, word := range strings.Fields(string(raw)) {
		if pid, err := strconv.Atoi(word); err == nil && pid > 1 {
			_ = unix.Kill(pid, unix.SIGKILL) // it may have ended by itself
		}
	}
	return nil
}
