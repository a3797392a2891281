//go:build system

package cluster

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
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// sysctls are the kernel's settings that kubelet changes for the whole machine, and
// what it sets them to.
var sysctls = map[string]string{
	"/proc/sys/vm/overcommit_memory":      "1",
	"/proc/sys/vm/panic_on_oom":           "0",
	"/proc/sys/kernel/panic":              "10",
	"/proc/sys/kernel/panic_on_oops":      "1",
	"/proc/sys/kernel/keys/root_maxkeys":  "1000000",
	"/proc/sys/kernel/keys/root_maxbytes": "25000000",
}

// coverSysctls puts files in their place, in this mount namespace, which have what
// kubelet wants: so it leaves the machine as it is.
func coverSysctls(dir string) error {
	for path, value := range sysctls {
		if _, err := os.Stat(path); err != nil {
			continue // this kernel has it not
		}
		file := filepath.Join(dir, strings.ReplaceAll(path, "/", "-"))
		if err := os.WriteFile(file, []byte(value+"\n"), 0o600); err != nil {
			return err
		}
		if err := unix.Mount(file, path, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("cover %s: %w", path, err)
		}
	}
	return nil
}

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

// makeGroup makes the control group below which kubelet makes those of pods.
func makeGroup(group string) error {
	for _, root := range groupRoots() {
		dir := filepath.Join(root, group)
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		// A new cpuset of version 1 is empty, and takes no process.
		for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
			if raw, err := os.ReadFile(filepath.Join(root, file)); err == nil && filepath.Base(root) == "cpuset" {
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
	raw, err := os.ReadFile(filepath.Join(root, "cgroup.controllers"))
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

// removeGroup kills what is in a control group, and removes it.
func removeGroup(group string) error {
	for range 250 {
		pids := inGroup(group)
		if len(pids) == 0 {
			return removeDirs(group)
		}
		for _, pid := range pids {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		time.Sleep(20 * time.Millisecond)
	}
	return fmt.Errorf("LEAKED: processes that cannot be killed: %v", inGroup(group))
}

func removeDirs(group string) error {
	var problems []error
	for _, root := range groupRoots() {
		var dirs []string
		_ = filepath.WalkDir(filepath.Join(root, group), func(path string, entry fs.DirEntry, err error) error {
			if err == nil && entry.IsDir() {
				dirs = append(dirs, path)
			}
			return nil
		})
		for _, dir := range slices.Backward(dirs) {
			problems = append(problems, os.Remove(dir))
		}
	}
	return errors.Join(problems...)
}

// inGroup lists the processes in or below a control group.
func inGroup(group string) []int {
	var out []int
	entries, _ := filepath.Glob("/proc/[0-9]*/cgroup")
	for _, path := range entries {
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		raw, _ := os.ReadFile(path)
		if err == nil && bytes.Contains(raw, []byte(":"+group+"/")) {
			out = append(out, pid)
		}
	}
	return out
}
