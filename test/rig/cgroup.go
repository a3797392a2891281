//go:build system

package rig

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// ControlGroups makes a control group in each hierarchy of this machine, of either
// version, but for cpuset's, where a new one of v1 takes no process. They are removed
// with the test, when the last process has left them.
func ControlGroups(t *testing.T, name string) (groups []string) {
	t.Helper()
	mounts, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		return !strings.HasPrefix(m.FSType, "cgroup") || m.Root != "/" || strings.Contains(m.VFSOptions, "cpuset"), false
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range mounts {
		group := fmt.Sprintf("%s/crust-test-%d-%s", m.Mountpoint, os.Getpid(), name)
		if err := os.Mkdir(group, 0o755); err != nil {
			Missing(t, "a control group of its own: "+err.Error())
		}
		t.Cleanup(func() { removeGroup(t, group) })
		groups = append(groups, group)
	}
	if len(groups) == 0 {
		Missing(t, "a hierarchy of control groups")
	}
	return groups
}

// removeGroup waits for processes that were killed a moment ago.
func removeGroup(t *testing.T, group string) {
	err := unix.Rmdir(group)
	for until := time.Now().Add(20 * time.Second); errors.Is(err, unix.EBUSY) && time.Now().Before(until); err = unix.Rmdir(group) {
		time.Sleep(10 * time.Millisecond)
	}
	if err != nil {
		t.Errorf("remove the control group %s: %v", group, err)
	}
}

// InGroup lists the processes of a control group.
func InGroup(t *testing.T, group string) []string {
	t.Helper()
	procs, err := os.ReadFile(group + "/cgroup.procs")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Fields(string(procs))
}
