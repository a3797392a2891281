package guest

import (
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/reference/vm/initramfs"
)

// initProcess is process 1: it sets up the machine, starts the agent and reaps orphans. When
// the agent ends, it turns the machine off.
func initProcess() error {
	err := prepareMachine()
	if err == nil {
		err = runAgent()
	}
	if err != nil {
		_, _ = fmt.Fprintln(os.Stderr, initramfs.MachineEnds, err)
		time.Sleep(100 * time.Millisecond) // until the console has printed it
	}
	syncAll(volumesDir, syncVolume)
	return powerOff()
}

func powerOff() error { return unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF) }

func prepareMachine() error {
	if err := makeRootMount(); err != nil {
		return fmt.Errorf("make a root mount: %w", err)
	}
	for _, m := range []struct {
		dir, kind string
		flags     uintptr
		data      string
	}{
		{"/dev", "devtmpfs", unix.MS_NOSUID, ""},
		{"/proc", "proc", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC, ""},
		{"/sys", "sysfs", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC, ""},
		{"/sys/fs/cgroup", "cgroup2", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC, ""},
		{"/run", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=755"},
	} {
		if err := unix.Mount(m.kind, m.dir, m.kind, m.flags, m.data); err != nil && !errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("mount %s: %w", m.dir, err)
		}
	}
	if err := os.WriteFile("/sys/fs/cgroup/cgroup.subtree_control", []byte("+cpu +memory +pids"), 0); err != nil {
		return fmt.Errorf("limits for containers: %w", err)
	}
	// The kernel's own hard limit is 4096. A container has this one, unless its spec has another.
	return errors.Join(unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 1024, Max: 1 << 20}), initramfs.Load(initramfs.Boot))
}

// makeRootMount mounts the root directory over itself: pivot_root cannot leave the initramfs.
func makeRootMount() error {
	const over = "/mnt"
	if err := unix.Mount("/", over, "", unix.MS_BIND, ""); err != nil {
		return err
	}
	if err := errors.Join(unix.Chdir(over), unix.Mount(".", "/", "", unix.MS_MOVE, "")); err != nil {
		return err
	}
	return errors.Join(unix.Chroot("."), unix.Chdir("/"))
}

func runAgent() error {
	agent, err := os.StartProcess(self, []string{"crust-vm-agent", roleAgent}, &os.ProcAttr{
		Files: []*os.File{os.Stdin, os.Stdout, os.Stderr}, Env: []string{},
	})
	if err != nil {
		return err
	}
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
		if pid == agent.Pid && (status.Exited() || status.Signaled()) {
			return fmt.Errorf("the agent has ended (exit code %d, signal %v)", status.ExitStatus(), status.Signal())
		}
	}
}
