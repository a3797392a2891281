package vmnode

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// Runtime is crust-vm on a node.
type Runtime struct {
	// Program is crust-vm, State its directory of sandboxes, and Config its
	// configuration, which is read by each of its starts.
	Program, State, Config string
}

// Install copies crust-vm and its agent into a directory, beside its configuration. What
// runs by another path is not of these tests, and none of their business.
func Install(t rig.T, dir string, program func(name string) string) *Runtime {
	t.Helper()
	r := &Runtime{Program: dir + "/crust-vm", State: "/run/" + rig.Prefix("vm"), Config: dir + "/crust-vm.json"}
	for _, name := range []string{"crust-vm", "crust-vm-agent"} {
		check.Must(t, os.WriteFile(dir+"/"+name, check.Value(os.ReadFile(program(name)))(t), 0o755)) //nolint:gosec // a program
	}
	r.Configure(t, map[string]any{})
	return r
}

// Env is what containerd needs in its environment.
func (r *Runtime) Env() []string { return []string{"CRUST_VM_CONFIG=" + r.Config} }

// Kernel is a directory with a kernel for guests.
func Kernel(t rig.T) string {
	t.Helper()
	dir, err := findKernel()
	if err != nil {
		rig.Missing(t, fmt.Sprintf("no kernel for guests: %v", err))
	}
	return dir
}

// OtherVirtiofsd is the virtiofsd in Rust: Debian 12 has the one in C, which is the default.
func OtherVirtiofsd(t rig.T) string {
	t.Helper()
	program, err := rig.Script("virtiofsd.sh")
	if err != nil {
		rig.Missing(t, fmt.Sprintf("no virtiofsd of Debian 13: %v", err))
	}
	return program
}

// findKernel asks apt, which takes seconds, once.
var findKernel = sync.OnceValues(func() (string, error) { return rig.Script("guest-kernel.sh") })

// Configure writes the configuration of crust-vm, with some keys changed.
func (r *Runtime) Configure(t rig.T, changes map[string]any) {
	t.Helper()
	keys := map[string]any{"kernel": Kernel(t), "stateDir": r.State, "program": r.Program, "bootTimeoutSeconds": 180, "memoryMiB": 320}
	maps.Copy(keys, changes)
	check.Must(t, os.WriteFile(r.Config, check.Value(json.Marshal(keys))(t), 0o600))
}

// IsMachine tells whether a process is a virtual machine of these tests: its command line
// names nothing of ours, but it is in our mount namespace.
func (r *Runtime) IsMachine(proc string) bool {
	command, _ := os.ReadFile(proc + "/cmdline") //nolint:gosec // a file of the kernel's
	if bytes.Contains(command, []byte(r.State)) {
		return true // the server of its filesystem
	}
	return isQEMU(proc) && sameNamespace(proc)
}

func isQEMU(proc string) bool {
	program, _ := os.Readlink(proc + "/exe")
	return strings.HasPrefix(filepath.Base(program), "qemu-system-")
}

func sameNamespace(proc string) bool {
	theirs, err := os.Readlink(proc + "/ns/mnt")
	ours, _ := os.Readlink("/proc/self/ns/mnt")
	return err == nil && theirs == ours
}

// Machines lists the virtual machines of these tests that run.
func (*Runtime) Machines() []int {
	return rig.Processes(func(proc string) bool { return isQEMU(proc) && sameNamespace(proc) })
}
