// Package cgroup moves processes between control groups: out of the group in which they
// were started, or into the group of their pod.
package cgroup

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// Move moves a process into the group with this name at the top of each hierarchy (cgroup v2, and all of v1), and
// creates the groups. A process in the root group of a hierarchy stays there: nobody ends or freezes that group.
//
// The error names the hierarchies that failed; the others are done. A process that has ended is not an error.
func Move(pid int, name string) error { return move("/proc", pid, name) }

func move(proc string, pid int, name string) error {
	groups, err := groupsOf(proc, pid)
	if err != nil || !slices.ContainsFunc(groups, func(g group) bool { return g.foreign("/", name) }) {
		return err
	}
	mounts, err := hierarchies(proc)
	if err != nil {
		return err
	}
	var errs []error
	for _, g := range groups {
		if err := g.leave(mounts, pid, name); err != nil && !errors.Is(err, unix.ESRCH) {
			errs = append(errs, fmt.Errorf("process %d cannot leave the control group %s: %w", pid, g, err))
		}
	}
	return errors.Join(errs...)
}

// group is where a process is in one hierarchy.
type group struct {
	controllers string // as the kernel lists them; empty for cgroup v2
	path        string
}

func (g group) String() string { return strings.TrimPrefix(g.controllers+":"+g.path, ":") }

// foreign reports whether the process has to leave the group. root is the root of the mount
// through which the hierarchy is visible.
func (g group) foreign(root, name string) bool {
	return g.path != "/" && g.path != root && g.path != filepath.Join(root, name)
}

// groupsOf lists the groups of a process; one that has ended has none.
func groupsOf(proc string, pid int) (groups []group, err error) {
	raw, err := os.ReadFile(filepath.Join(proc, strconv.Itoa(pid), "cgroup")) //nolint:gosec // the kernel's own directory
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(raw)) {
		fields := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(fields) != 3 {
			return nil, fmt.Errorf("the control groups of process %d cannot be read: %q", pid, line)
		}
		groups = append(groups, group{controllers: fields[1], path: fields[2]})
	}
	return groups, nil
}

// hierarchies lists the cgroup mounts that are visible to this process.
func hierarchies(proc string) ([]*mountinfo.Info, error) {
	raw, err := os.ReadFile(filepath.Join(proc, "self/mountinfo")) //nolint:gosec // the kernel's own file
	if err != nil {
		return nil, err
	}
	return mountinfo.GetMountsFromReader(bytes.NewReader(raw), func(m *mountinfo.Info) (skip, stop bool) {
		return m.FSType != "cgroup" && m.FSType != "cgroup2", false
	})
}

// leave moves a process out of the group.
func (g group) leave(mounts []*mountinfo.Info, pid int, name string) error {
	if g.path == "/" {
		return nil
	}
	i := slices.IndexFunc(mounts, g.isIn)
	if i < 0 {
		return errors.New("its hierarchy is not mounted")
	}
	if !g.foreign(mounts[i].Root, name) {
		return nil
	}
	return enter(mounts[i], name, pid)
}

// enter moves a process into a group of one hierarchy, and creates the group.
func enter(m *mountinfo.Info, name string, pid int) error {
	dir := m.Mountpoint
	for part := range strings.FieldsFuncSeq(name, func(r rune) bool { return r == '/' }) {
		top := dir
		dir = filepath.Join(top, part)
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) { //nolint:gosec // as all control groups
			return err
		}
		if !slices.Contains(strings.Split(m.VFSOptions, ","), "cpuset") {
			continue
		}
		// In v1 a new group has no processor and no memory, and takes no process.
		for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
			if err := inherit(top, dir, file); err != nil {
				return err
			}
		}
	}
	return os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0o600)
}

func (g group) isIn(m *mountinfo.Info) bool {
	if g.controllers == "" {
		return m.FSType == "cgroup2"
	}
	shown := strings.Split(m.VFSOptions, ",")
	return m.FSType == "cgroup" && !slices.ContainsFunc(strings.Split(g.controllers, ","), func(controller string) bool {
		return !slices.Contains(shown, controller)
	})
}

// inherit copies a setting from the parent group if the group has none.
func inherit(parent, child, file string) error {
	own, err := os.ReadFile(filepath.Join(child, file)) //nolint:gosec // below the hierarchy's mount
	if err != nil || len(bytes.TrimSpace(own)) > 0 {
		return err
	}
	value, err := os.ReadFile(filepath.Join(parent, file)) //nolint:gosec // below the hierarchy's mount
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(child, file), value, 0o600) //nolint:gosec // below the hierarchy's mount
}

// Path returns the path of a group from the top of its hierarchy for the cgroupsPath of an OCI spec. For the form
// slice:prefix:name it is the group that systemd would make. Without a cgroupsPath it is "", which is no group.
func Path(cgroupsPath string) string {
	if cgroupsPath == "" {
		return ""
	}
	parts := strings.Split(cgroupsPath, ":")
	if len(parts) != 3 {
		return filepath.Join("/", cgroupsPath)
	}
	unit := parts[2]
	if !strings.HasSuffix(unit, ".slice") {
		unit = strings.TrimPrefix(parts[1]+"-"+unit+".scope", "-")
	}
	// The slice a-b.slice is in a.slice, and "-.slice" is the top.
	dir, above := "/", ""
	for part := range strings.SplitSeq(strings.TrimSuffix(parts[0], ".slice"), "-") {
		if part != "" {
			above += part
			dir = filepath.Join(dir, above+".slice")
			above += "-"
		}
	}
	return filepath.Join(dir, unit)
}

// Join moves a process into the group at a path in each hierarchy, and creates the groups.
func Join(pid int, path string) error {
	if path == "" {
		return nil
	}
	mounts, err := writable("/proc")
	for _, m := range mounts {
		if err := enter(m, path, pid); err != nil {
			return fmt.Errorf("process %d cannot join the control group %s: %w", pid, filepath.Join(m.Mountpoint, path), err)
		}
	}
	return err
}

// Remove removes the groups at a path. It waits at most this long for killed processes.
func Remove(path string, most time.Duration) error {
	if path == "" {
		return nil
	}
	mounts, err := writable("/proc")
	errs := []error{err}
	until := time.Now().Add(most)
	for _, m := range mounts {
		dir := filepath.Join(m.Mountpoint, path)
		err := os.Remove(dir)
		for ; errors.Is(err, unix.EBUSY) && time.Now().Before(until); err = os.Remove(dir) {
			time.Sleep(10 * time.Millisecond)
		}
		if !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Kill kills the processes in the groups at a path.
func Kill(path string) {
	for _, file := range Files(path, "cgroup.procs") {
		raw, _ := os.ReadFile(file) //nolint:gosec // the kernel's own; if it is gone, so are its processes
		for word := range strings.FieldsSeq(string(raw)) {
			if pid, err := strconv.Atoi(word); err == nil && pid > 1 {
				_ = unix.Kill(pid, unix.SIGKILL) // it may have ended by itself
			}
		}
	}
}

// Files lists the existing files with this name in the groups at a path.
func Files(path, name string) (files []string) {
	if filepath.Join("/", path) == "/" {
		return nil // of no group, and not of the root group
	}
	mounts, _ := writable("/proc") // without any there is no such file
	for _, m := range mounts {
		file := filepath.Join(m.Mountpoint, path, name)
		if _, err := os.Stat(file); err == nil {
			files = append(files, file)
		}
	}
	return files
}

func writable(proc string) ([]*mountinfo.Info, error) {
	mounts, err := hierarchies(proc)
	return slices.DeleteFunc(mounts, func(m *mountinfo.Info) bool {
		return slices.Contains(strings.Split(m.Options, ","), "ro")
	}), err
}
