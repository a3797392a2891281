package rig

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// groupRoots are where control groups are: one place, or one for each controller.
func groupRoots() []string {
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err == nil {
		return []string{"/sys/fs/cgroup"}
	}
	roots, _ := filepath.Glob("/sys/fs/cgroup/*")
	return slices.DeleteFunc(roots, func(root string) bool {
		info, err := os.Lstat(root) // links are other names of one controller
		return err != nil || !info.IsDir()
	})
}

// MakeGroup makes a control group, such as /name, in each hierarchy of this machine.
func MakeGroup(group string) error {
	for _, root := range groupRoots() {
		dir := filepath.Join(root, group)
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) { //nolint:gosec // as the kernel's own
			return err
		}
		// A new cpuset of version 1 is empty, and takes no process.
		for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
			if raw, err := os.ReadFile(filepath.Join(root, file)); err == nil && filepath.Base(root) == "cpuset" { //nolint:gosec // a file of the kernel's
				if err := os.WriteFile(filepath.Join(dir, file), raw, 0o600); err != nil {
					return err
				}
			}
		}
		if err := delegate(root, dir); err != nil {
			return err
		}
	}
	return nil
}

// delegate lets the groups below have the controllers that there are (version 2).
func delegate(root, dir string) error {
	raw, err := os.ReadFile(filepath.Join(root, "cgroup.controllers")) //nolint:gosec // a file of the kernel's
	if err != nil || filepath.Base(root) == "unified" {
		return nil //nolint:nilerr // version 1 has no such file, and leaves it to none
	}
	all := "+" + strings.Join(strings.Fields(string(raw)), " +")
	for _, one := range []string{root, dir} {
		if err := os.WriteFile(filepath.Join(one, "cgroup.subtree_control"), []byte(all), 0o600); err != nil {
			return fmt.Errorf("delegate control groups below %s: %w", one, err)
		}
	}
	return nil
}

// GroupDirs are the directories of a control group and of those below it, each after the one that it is in.
func GroupDirs(group string) []string {
	var dirs []string
	for _, root := range groupRoots() {
		_ = filepath.WalkDir(filepath.Join(root, group), func(path string, entry fs.DirEntry, err error) error {
			if err == nil && entry.IsDir() {
				dirs = append(dirs, path)
			}
			return nil
		})
	}
	return dirs
}

// RemoveGroup removes a control group with those below it. It waits for processes that were killed a moment ago.
func RemoveGroup(group string) error {
	return check.Until(20*time.Second, 10*time.Millisecond, func() error { return TryRemoveGroup(group) })
}

// TryRemoveGroup removes a control group with those below it, if no process is in them.
func TryRemoveGroup(group string) error {
	var problems []error
	for _, dir := range slices.Backward(GroupDirs(group)) {
		if err := os.Remove(dir); !errors.Is(err, fs.ErrNotExist) { // runc removes some itself
			problems = append(problems, err)
		}
	}
	return errors.Join(problems...)
}

// KillGroup kills all that is below a control group, and removes it.
func KillGroup(group string) error {
	return errors.Join(KillAll(func() []int { return BelowGroup(group) }), RemoveGroup(group))
}

// KillAll kills processes until none is left.
func KillAll(left func() []int) error {
	stay := check.Left(30*time.Second, 20*time.Millisecond, func() []int {
		pids := left()
		for _, pid := range pids {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		return pids
	})
	if len(stay) > 0 {
		return fmt.Errorf("LEAKED: processes that cannot be killed: %v", stay)
	}
	return nil
}

// BelowGroup lists the processes in control groups below one.
func BelowGroup(group string) []int {
	return Processes(func(proc string) bool {
		raw, _ := os.ReadFile(proc + "/cgroup") //nolint:gosec // a file of the kernel's
		return bytes.Contains(raw, []byte(":"+group+"/"))
	})
}

// Processes lists the processes of which something is true, by their directory in /proc.
func Processes(is func(proc string) bool) (pids []int) {
	all, _ := filepath.Glob("/proc/[0-9]*")
	for _, proc := range all {
		if pid, err := strconv.Atoi(filepath.Base(proc)); err == nil && is(proc) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// Children lists the processes that a process is the parent of.
func Children(parent int) []int {
	return Processes(func(proc string) bool {
		child, _ := strconv.Atoi(filepath.Base(proc))
		of, err := Parent(child) // one that has ended meanwhile has none
		return err == nil && of == parent
	})
}

// Parent is the process that a process is a child of.
func Parent(pid int) (parent int, err error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err == nil {
		_, rest, _ := strings.Cut(string(raw), "\nPPid:")
		_, err = fmt.Sscan(rest, &parent)
	}
	return parent, err
}

// DescribeProcess is its number and its command line.
func DescribeProcess(pid int) string {
	command, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return fmt.Sprintf("process %d %q", pid, bytes.ReplaceAll(command, []byte{0}, []byte{' '}))
}

// ControlGroups makes a control group in each hierarchy of this machine, and gives the
// directories. They are removed with the test, when the last process has left them.
func ControlGroups(t T, name string) []string {
	t.Helper()
	group := fmt.Sprintf("/crust-test-%d-%s", os.Getpid(), name)
	if err := MakeGroup(group); err != nil {
		Missing(t, "a control group of its own: "+err.Error())
	}
	t.Cleanup(func() {
		err := RemoveGroup(group)
		check.That(t, err == nil, "%v", err)
	})
	return GroupDirs(group)
}

// InGroup lists the processes of a control group, by its directory.
func InGroup(t T, dir string) []string {
	t.Helper()
	return strings.Fields(string(check.Value(os.ReadFile(dir + "/cgroup.procs"))(t)))
}
