// Command guest is in the machine of a node twice: as the initramfs's init, which starts systemd on the
// machine's disk, and as a service, which runs the host's commands.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/reference/vm/initramfs"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/node"
)

// patience is how long a command may take.
const patience = 10 * time.Minute

func main() {
	run := serve
	if os.Getpid() == 1 {
		run = boot
	}
	fmt.Println("guest:", run()) // neither returns but with an error; systemd starts the service again
}

// boot loads the drivers of the disk, and has systemd take this process over.
func boot() error {
	const disk, root = "/dev/vda", "/mnt"
	if err := unix.Mount("devtmpfs", "/dev", "devtmpfs", 0, ""); err != nil {
		return err
	}
	if err := initramfs.Load(initramfs.Boot); err != nil {
		return err
	}
	err := check.Until(time.Minute, 10*time.Millisecond, func() error { return unix.Mount(disk, root, "ext4", 0, "") })
	if err != nil {
		return fmt.Errorf("mount %s: %w", disk, err)
	}
	err = errors.Join(unix.Unmount("/dev", unix.MNT_DETACH), os.Chdir(root), unix.Mount(".", "/", "", unix.MS_MOVE, ""), unix.Chroot("."), os.Chdir("/"))
	if err != nil {
		return err
	}
	return syscall.Exec("/sbin/init", []string{"/sbin/init"}, nil)
}

// serve says hello, and runs one command after the other.
func serve() error {
	var port *os.File
	err := check.Until(patience, 100*time.Millisecond, func() (err error) {
		port, err = os.OpenFile("/dev/virtio-ports/"+node.Port, os.O_RDWR, 0)
		return err
	})
	if err != nil {
		return err
	}
	commands, results := json.NewDecoder(port), json.NewEncoder(port)
	// What the host sent before, to a service that ended because it came too early, was lost.
	if err := results.Encode(node.Result{}); err != nil {
		return err
	}
	for {
		var command node.Command
		if err := commands.Decode(&command); err != nil {
			return err
		}
		if err := results.Encode(result(command)); err != nil {
			return err
		}
	}
}

func result(command node.Command) node.Result {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, command.Args[0], command.Args[1:]...) //nolint:gosec // the test's
	cmd.WaitDelay = time.Second                                           // for what it left that has its output
	out, err := cmd.CombinedOutput()
	r := node.Result{ID: command.ID, Output: string(out), Code: cmd.ProcessState.ExitCode()}
	if cmd.ProcessState == nil {
		r.Output, r.Code = fmt.Sprint(r.Output, err), 127
	}
	return r
}
