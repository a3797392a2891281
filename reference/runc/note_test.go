package runc

import (
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/reference/process"
	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestPauseIsToldByItsStart(t *testing.T) {
	found, err := process.Of(os.Getpid())
	check.Must(t, err)
	self := pause(found)
	if self.ended() {
		t.Fatal("this process does not live")
	}
	other := self
	other.Start++
	if !other.ended() || !(pause{}).ended() {
		t.Fatal("a process of another start is taken for the same")
	}
	if _, err := other.open("x", abi.Info{}); err == nil {
		t.Fatal("opened in a process of another start")
	}
}

// A process of the pod may write to the sandbox's /dev.
func TestNoLinkLeadsOutOfASandbox(t *testing.T) {
	outside, sandbox := t.TempDir(), t.TempDir()
	check.Must(t, os.MkdirAll(outside+"/volume", 0o700))
	check.Must(t, os.MkdirAll(sandbox+"/dev/crust/volume", 0o700))
	root, err := unix.Open(sandbox, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	check.Must(t, err)
	defer func() { _ = unix.Close(root) }()
	opens := func() error {
		fd, err := sys.OpenBeneath(root, places[1:]+"/volume", unix.O_PATH|unix.O_DIRECTORY, inSandbox)
		if err == nil {
			_ = unix.Close(fd)
		}
		return err
	}
	check.Must(t, opens())
	check.Must(t, os.RemoveAll(sandbox+"/dev/crust"))
	for _, to := range []string{outside, "/proc/self/root" + outside, "/proc/self/cwd", "../../" + outside} {
		check.Must(t, os.Symlink(to, sandbox+"/dev/crust"))
		if err := opens(); err == nil {
			t.Errorf("a link to %s is followed", to)
		}
		dev, err := unix.Open(sandbox+"/dev", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		check.Must(t, err)
		if fd, err := place(dev, "crust", unix.O_PATH); err == nil {
			_ = unix.Close(fd)
			t.Errorf("a place is made behind a link to %s", to)
		}
		_ = unix.Close(dev)
		check.Must(t, os.Remove(sandbox+"/dev/crust"))
	}
}

func TestAPodsLockIsNotWaitedForForEver(t *testing.T) {
	dir := t.TempDir()
	var fds [2]int
	for i := range fds {
		fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		check.Must(t, err)
		defer func() { _ = unix.Close(fd) }()
		fds[i] = fd
	}
	check.Must(t, lockWithin(fds[0], time.Second))
	if err := lockWithin(fds[1], 20*time.Millisecond); err == nil {
		t.Fatal("locked twice")
	}
	check.Must(t, unix.Flock(fds[0], unix.LOCK_UN))
	check.Must(t, lockWithin(fds[1], time.Second))
}
