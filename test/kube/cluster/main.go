//go:build system

package cluster

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/rig"
)

// Main runs the tests of a package in namespaces of their own, as a node has them,
// ends the cluster that they share, and looks for what was left.
func Main(m *testing.M) int {
	if err := Build(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return rig.Run(func() int {
		code := 1
		undo, err := prepare()
		if err == nil {
			code = m.Run()
		}
		if err := errors.Join(err, closeShared(), undo()); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return code
	}, unix.CLONE_NEWNET)
}

// covered are directories below which kubelet writes wherever its root is. They
// hold nothing that a test needs.
var covered = []string{"/var/lib", "/var/log"}

// prepare makes the namespaces what a node has: mounts that are shared, and an
// address that is not the loopback's.
func prepare() (undo func() error, err error) {
	undo = func() error {
		var problems []error
		for _, dir := range append(slices.Collect(maps.Keys(sysctls)), covered...) {
			problems = append(problems, rig.Unmount(dir))
		}
		return errors.Join(problems...)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
		return undo, fmt.Errorf("share mounts: %w", err)
	}
	for _, dir := range covered {
		if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=0755"); err != nil {
			return undo, fmt.Errorf("mount a tmpfs on %s: %w", dir, err)
		}
	}
	return undo, errors.Join(coverSysctls(covered[0]), network())
}

// network gives the node its address. It goes with the namespace.
func network() error {
	for _, command := range []string{
		"link set lo up", "link add knode type veth peer name knode-peer", "addr add " + nodeAddress + "/24 dev knode",
		"link set knode up", "link set knode-peer up", "route add default dev knode",
	} {
		if out, err := exec.Command("ip", strings.Fields(command)...).CombinedOutput(); err != nil {
			return fmt.Errorf("ip %s: %w: %s", command, err, out)
		}
	}
	return nil
}
