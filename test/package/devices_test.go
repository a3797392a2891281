//go:build system

package package_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// standardDevices is what DevicePolicy=closed leaves.
var standardDevices = []string{"c 1:3 rwm", "c 1:5 rwm", "c 1:7 rwm", "c 1:8 rwm", "c 1:9 rwm", "c 5:0 rwm", "c 5:2 rw", "c 136:* rw"}

// blockDevices is DeviceAllow=block-* rw.
const blockDevices = "b *:* rw"

// deviceGroup is the control group that stands in for systemd's.
const deviceGroup = "/sys/fs/cgroup/devices/" + machineName

// enforceDevices holds the running service to the unit's list of devices on a machine with control groups of version 1.
// There, systemd in a container may not do that; with version 2 it does so itself.
func (m *machine) enforceDevices() {
	m.t.Helper()
	if _, err := os.Stat(filepath.Dir(deviceGroup) + "/devices.deny"); err != nil {
		return
	}
	policy, allowed := m.property("DevicePolicy"), m.property("DeviceAllow")
	check.Require(m.t, policy == "closed" && strings.Contains(allowed, "block-* rw"),
		"the unit's devices are %q %q, which this test cannot enforce", policy, allowed)
	check.Must(m.t, os.MkdirAll(deviceGroup, 0o755))
	control := func(file, text string) {
		m.t.Helper()
		check.Must(m.t, os.WriteFile(deviceGroup+"/"+file, []byte(text), 0o600))
	}
	control("devices.deny", "a")
	for _, rule := range append(slices.Clone(standardDevices), blockDevices) {
		control("devices.allow", rule)
	}
	control("cgroup.procs", m.hostPid())
}

// removeDeviceGroup is for when the machine is off, and the group empty.
func removeDeviceGroup(t *testing.T) {
	t.Helper()
	err := os.Remove(deviceGroup)
	for tries := 0; errors.Is(err, unix.EBUSY) && tries < 1000; tries++ {
		time.Sleep(20 * time.Millisecond)
		err = os.Remove(deviceGroup)
	}
	check.That(t, err == nil || errors.Is(err, fs.ErrNotExist), "%v", err)
}

// hostPid is the number of the service's process outside of the machine.
func (m *machine) hostPid() string {
	m.t.Helper()
	inside := m.property("MainPID")
	namespace := check.Value(os.Readlink(m.path("/proc/" + inside + "/ns/pid")))(m.t)
	processes := check.Value(filepath.Glob("/proc/[0-9]*"))(m.t)
	for _, dir := range processes {
		// One that ends meanwhile has neither.
		status, _ := os.ReadFile(dir + "/status")
		own, _ := os.Readlink(dir + "/ns/pid")
		if own == namespace && strings.Contains(string(status), "\t"+inside+"\n") && strings.Contains(string(status), "Name:\tcrust-proxy\n") {
			return filepath.Base(dir)
		}
	}
	m.t.Fatal("the service's process cannot be seen")
	return ""
}
