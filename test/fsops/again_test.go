//go:build system

package fsops_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// asOther has this binary do one thing and end, as a program that a test can kill.
const asOther = "CRUST_TEST_FSOPS"

// watchdogMode is the argument that makes this binary a watchdog.
const watchdogMode = "crust-test-watchdog"

// again starts this binary to do one thing.
func again(t testing.TB, what string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), asOther+"="+what)
	cmd.Stderr = os.Stderr
	check.Must(t, cmd.Start())
	return cmd
}

func other(what string, args []string) error {
	switch what {
	case "group":
		root, err := unix.Open(args[0], unix.O_PATH, 0)
		if err != nil {
			return err
		}
		_, err = fsops.ApplyGroup(context.Background(), root, group, volume.GroupOnMismatch)
		return err
	case "freeze":
		root, err := unix.Open(args[1], unix.O_PATH, 0)
		if err != nil {
			return err
		}
		timeout, err := time.ParseDuration(args[2])
		if err != nil {
			return err
		}
		freezer := otherFreezer(args[0])
		if len(args) > 3 {
			freezer.ControlGroup = args[3]
		}
		return freezer.Freeze("key", root, timeout)
	case "thaw":
		return otherFreezer(args[0]).Thaw("key", -1)
	default:
		return fmt.Errorf("what is %s?", strings.Join(append([]string{what}, args...), " "))
	}
}

func otherFreezer(dir string) fsops.Freezer {
	return fsops.Freezer{Dir: dir, Watchdog: []string{"/proc/self/exe", watchdogMode}}
}
