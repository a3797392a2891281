package cgroup

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// Path is the path of a group from the top of its hierarchy, as the cgroupsPath of an OCI
// spec has it. systemd's form slice:prefix:name is the group that systemd would make.
func Path(cgroupsPath string) string {
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
	mounts, err := writable("/proc")
	for _, m := range mounts {
		if err := enter(m, path, pid); err != nil {
			return fmt.Errorf("process %d cannot join the control group %s: %w", pid, filepath.Join(m.Mountpoint, path), err)
		}
	}
	return err
}

// Remove removes the groups at a path. It waits for processes that were killed, at most so
// long.
func Remove(path string, most time.Duration) error {
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

// Files lists the files of this name that the groups at a path have.
func Files(path, name string) (files []string) {
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
