package rig

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// clearEarlier removes what earlier runs of tests have left that were killed: processes, frozen
// filesystems, loop devices, control groups and directories. The stamp in a run's directory proves that it
// was ours, and gives the mark that all of them have in their names.
func clearEarlier() {
	dirs, _ := filepath.Glob(filepath.Join(os.TempDir(), "crust-[a-z][0-9][a-z][0-9][a-z][0-9]"))
	for _, dir := range dirs {
		if mark := stamped(dir); mark != "" && !runs(mark) {
			fmt.Fprintln(os.Stderr, "clearing what an earlier run left that was killed:", dir)
			clearRun(mark)
		}
	}
}

// runs reports whether the tests with a mark run: their program is a child of itself, outside of their namespaces.
func runs(mark string) bool {
	return len(Processes(func(proc string) bool {
		if !inRun(proc, mark) {
			return false
		}
		pid, _ := strconv.Atoi(filepath.Base(proc))
		parent, err := Parent(pid)
		above := fmt.Sprint("/proc/", parent)
		return err == nil && !inRun(above, mark) && programOf(above) == programOf(proc)
	})) > 0
}

func inRun(proc, mark string) bool {
	env, _ := os.ReadFile(proc + "/environ") //nolint:gosec // a file of the kernel's
	return bytes.Contains(env, []byte(insideEnv+"="+mark))
}

func programOf(proc string) string {
	program, _ := os.Readlink(proc + "/exe")
	return program
}

// clearRun does what it can: others may do the same at this time.
func clearRun(mark string) {
	_ = KillAll(func() []int {
		return Processes(func(proc string) bool {
			groups, _ := os.ReadFile(proc + "/cgroup") //nolint:gosec // a file of the kernel's
			return inRun(proc, mark) || hasMark(programOf(proc), mark) ||
				bytes.Contains(groups, []byte("/crust-test-cn"+mark))
		})
	})
	for device, file := range Loops(mark) {
		if !hasMark(file, mark) {
			continue
		}
		for above, under := range Loops("loop") { // a guest's, over the device of a volume
			if under == device || under == "/"+filepath.Base(device) { // there is no more /dev where it was opened
				_ = detachOver(above, under)
			}
		}
		thaw(device)
		_ = detachOver(device, file)
	}
	for _, root := range groupRoots() {
		groups, _ := filepath.Glob(root + "/crust-test-*" + mark + "*")
		for _, group := range groups {
			_ = RemoveGroup(strings.TrimPrefix(group, root))
		}
	}
	for _, temp := range []string{os.TempDir(), "/tmp", "/var/tmp"} {
		left, _ := filepath.Glob(temp + "/*" + mark + "*")
		for _, path := range left {
			if rootOwns(path) && hasMark(filepath.Base(path), mark) {
				_ = os.RemoveAll(path)
			}
		}
	}
}

// thaw thaws a filesystem that was frozen when its last mount went: the kernel keeps it, and its device, until then.
func thaw(device string) {
	for _, fs := range []string{"ext4", "xfs", "btrfs"} {
		mount, err := MountAside(device, fs)
		if err != nil {
			continue
		}
		if dir, err := unix.Openat(int(mount.Fd()), ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err == nil {
			const fiThaw = 0xc0045878 // FITHAW of the kernel's <linux/fs.h>
			_ = unix.IoctlSetInt(dir, fiThaw, 0)
			_ = unix.Close(dir)
		}
		_ = mount.Close()
		return
	}
}
