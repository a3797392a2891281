package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// shared is the one cluster of a test binary.
var shared struct {
	sync.Mutex
	machines bool // pods can have one
	stage    *rig.Stage
	started  bool
	cluster  *Cluster
	err      error
}

// Main runs the tests of a package in namespaces of their own, as a node has them,
// ends the cluster that they share, and looks for what was left.
func Main(m *testing.M) int { return run(m, Build) }

// MainVM is Main for a node that has the handler CrustVM, too.
func MainVM(m *testing.M) int {
	shared.machines = true
	return run(m, func() error {
		kernel, err := rig.Script("guest-kernel.sh")
		// In the node, apt's lists are covered.
		return errors.Join(err, os.Setenv("CRUST_TEST_KERNEL", kernel), Build())
	})
}

func run(m *testing.M, build func() error) int {
	if err := build(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return rig.Run(func() int {
		code := 1
		shared.stage = rig.NewStage(context.Background())
		err := shared.stage.Do(func(t rig.T) {
			prepare(t)
			code = m.Run()
		})
		if err := errors.Join(err, shared.stage.End()); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return code
	}, unix.CLONE_NEWNET)
}

// Shared gives the cluster that all tests of this binary share; the first one
// starts it. All components run, and crust-proxy has its default settings.
func Shared(t rig.T) *Cluster {
	t.Helper()
	shared.Lock()
	defer shared.Unlock()
	if !shared.started {
		rig.Need(t, "go", "runc", "busybox", "ip", "mkfs.ext4", "mkfs.xfs", "blkid", "losetup")
		ours := map[string]string{}
		names := []string{"crust-proxy", "crust-driver", "crust-runc-agent", "crust-runc", "crustctl"}
		if shared.machines {
			rig.Need(t, "qemu-system-x86_64")
			names = append(names, "crust-vm", "crust-vm-agent")
		}
		for _, name := range names {
			ours[name] = rig.Program(t, name)
		}
		shared.started = true // what is missing is missing for the next test, too
		shared.err = shared.stage.Do(func(stage rig.T) { shared.cluster = open(stage, ours, "debug") })
	}
	check.Require(t, shared.err == nil, "the cluster cannot be used: %v", shared.err)
	return shared.cluster
}

// giveUp has the tests that follow fail at once. Each of them would otherwise wait for
// what does not come back, and all together for longer than a run may take.
func giveUp(err error) {
	shared.Lock()
	defer shared.Unlock()
	shared.err = fmt.Errorf("an earlier test left it broken: %w", err)
}

// OnNode gives a cluster to a program that is no test and has namespaces of its own;
// Build comes before those. Ours are the programs of this project by name:
// crust-proxy, crust-driver, crust-runc with crust-runc-agent beside it.
func OnNode(t rig.T, ours map[string]string, logLevel string) *Kube {
	check.Must(t, rig.MakeMountsPrivate())
	prepare(t)
	return &Kube{Cluster: open(t, ours, logLevel), T: t}
}

// covered are directories below which kubelet writes wherever its root is. They hold nothing that a test needs.
var covered = []string{"/var/lib", "/var/log"}

// prepare makes the namespaces what a node has: mounts that are shared, and an
// address that is not the loopback's, which goes with the namespace.
func prepare(t rig.T) {
	t.Cleanup(func() {
		for _, dir := range append(slices.Collect(maps.Keys(sysctls)), covered...) {
			rig.UnmountAll(t, dir)
		}
	})
	check.Must(t, unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""))
	for _, dir := range covered {
		check.Must(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=0755"))
	}
	coverSysctls(t, covered[0])
	for _, command := range []string{
		"link set lo up", "link add knode type veth peer name knode-peer", "addr add " + NodeAddress + "/24 dev knode",
		"link set knode up", "link set knode-peer up", "route add default dev knode",
	} {
		rig.Command(t, "ip", strings.Fields(command)...)
	}
}

// sysctls are the kernel's settings that kubelet changes for the whole machine, and what it sets them to.
var sysctls = map[string]string{
	"/proc/sys/vm/overcommit_memory":      "1",
	"/proc/sys/vm/panic_on_oom":           "0",
	"/proc/sys/kernel/panic":              "10",
	"/proc/sys/kernel/panic_on_oops":      "1",
	"/proc/sys/kernel/keys/root_maxkeys":  "1000000",
	"/proc/sys/kernel/keys/root_maxbytes": "25000000",
}

// coverSysctls puts files in their place, in this mount namespace, which have what
// kubelet wants: so it leaves the machine as it is. Only beside a proc of which nothing is
// covered does the kernel let a pod with a user namespace mount its own.
func coverSysctls(t rig.T, dir string) {
	for path, value := range sysctls {
		if _, err := os.Stat(path); err != nil {
			continue // this kernel has it not
		}
		file := filepath.Join(dir, strings.ReplaceAll(path, "/", "-"))
		check.Must(t, os.WriteFile(file, []byte(value+"\n"), 0o600))
		check.Must(t, unix.Mount(file, path, "", unix.MS_BIND, ""))
	}
	check.Must(t, os.Mkdir(dir+"/proc", 0o700))
	check.Must(t, unix.Mount("proc", dir+"/proc", "proc", 0, ""))
}
