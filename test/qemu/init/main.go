// Command init is the only program of a virtual machine: it tries what package fsops
// does on that machine's kernel, with all capabilities, tells the console, and turns
// the machine off.
package main

import (
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/reference/fsops"
	"github.com/crust-proxy/crust-proxy/reference/vm/initramfs"
)

const (
	disk  = "/dev/vda"
	mount = "/mnt"
	watch = "watch"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == watch {
		if err := fsops.Watch(os.Args[2:]); err != nil {
			fmt.Println("WATCHDOG", err)
		}
		return
	}
	if err := all(); err != nil {
		fmt.Println("FAILED", err)
	} else {
		fmt.Println("PASSED")
	}
	unix.Sync()
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
}

func all() error {
	for _, step := range []func() error{kernelPlaces, modules, mountDisk} {
		if err := step(); err != nil {
			return err
		}
	}
	root, err := unix.Open(mount, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	for _, step := range []func(int) error{grow, group, freeze, healthy, recorded} {
		if err := step(root); err != nil {
			return err
		}
	}
	return nil
}

func mountDisk() error { return unix.Mount(disk, mount, "ext4", 0, "") }

func kernelPlaces() error {
	for dir, kind := range map[string]string{"/dev": "devtmpfs", "/proc": "proc", "/sys": "sysfs", "/run": "tmpfs"} {
		if err := errors.Join(os.MkdirAll(dir, 0o755), unix.Mount(kind, dir, kind, 0, "")); err != nil {
			return fmt.Errorf("mount %s: %w", dir, err)
		}
	}
	return os.MkdirAll(mount, 0o755)
}

// modules loads the drivers of the disk and waits for it.
func modules() error {
	if err := initramfs.Load(initramfs.Boot); err != nil {
		return err
	}
	for range 500 {
		if _, err := os.Stat(disk); err == nil {
			return nil
		}
		time.Sleep(10 * time.Millisecond)
	}
	return errors.New("there is no disk")
}

// grow grows the filesystem while a writer writes.
func grow(root int) error {
	device, err := unix.Open(disk, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	if err := wantNeeds(root, device, true); err != nil {
		return err
	}
	before, err := fsops.Stat(root, false)
	if err != nil {
		return err
	}
	stop, stopped := make(chan struct{}), make(chan error)
	go write(stop, stopped)
	size, err := fsops.Grow(root, device, 0, 0)
	close(stop)
	if err := errors.Join(err, <-stopped); err != nil {
		return err
	}
	after, err := fsops.Stat(root, false)
	if err != nil {
		return err
	}
	fmt.Println("GREW", before.Usage[0].Total, after.Usage[0].Total, "of", size)
	if err := wantNeeds(root, device, false); err != nil {
		return err
	}
	if after.Usage[0].Total < before.Usage[0].Total*3/2 || after.Abnormal {
		return fmt.Errorf("it did not grow, or not well: %+v", after)
	}
	return nil
}

func wantNeeds(root, device int, want bool) error {
	needs, err := fsops.NeedsGrow(root, device)
	if err == nil && needs != want {
		err = fmt.Errorf("it needs to grow: %v", needs)
	}
	return err
}

func write(stop chan struct{}, stopped chan error) {
	for i := 0; ; i++ {
		select {
		case <-stop:
			stopped <- nil
			return
		default:
			if err := os.WriteFile(fmt.Sprintf("%s/f%d", mount, i%20), make([]byte, 65536), 0o600); err != nil {
				stopped <- err
				return
			}
		}
	}
}

// group tries the fall-back for kernels without fchmodat2.
func group(root int) error {
	if err := os.Symlink("f0", mount+"/link"); err != nil {
		return err
	}
	changed, err := fsops.ApplyGroup(root, 4321, fsops.OnRootMismatch, false)
	if err != nil {
		return err
	}
	again, err := fsops.ApplyGroup(root, 4321, fsops.Always, false)
	if err != nil {
		return err
	}
	info, err := os.Stat(mount + "/f0")
	if err != nil {
		return err
	}
	fmt.Println("GROUP", changed, again, info.Mode())
	if changed < 3 || again != 0 || info.Mode() != 0o660 {
		return errors.New("the files are not the group's")
	}
	return nil
}

func freeze(root int) error {
	f := fsops.Freezer{Dir: "/run/frozen", Watchdog: []string{"/proc/self/exe", watch}}
	if err := errors.Join(f.Freeze("key", root, time.Minute), f.Thaw("key", root), f.Freeze("key", root, time.Second)); err != nil {
		return err
	}
	began := time.Now()
	err := os.WriteFile(mount+"/after", nil, 0o600) // waits for the watchdogs
	waited := time.Since(began)
	fmt.Println("FROZE for", waited.Round(100*time.Millisecond))
	if waited < 500*time.Millisecond {
		return errors.New("it was not frozen")
	}
	return err
}

func healthy(root int) error {
	report, err := fsops.Stat(root, false)
	if err == nil && report.Abnormal {
		err = errors.New(report.Message)
	}
	return err
}

// recorded tells what every kernel lets be known of an ext4 that has seen an error.
func recorded(root int) error {
	if err := os.WriteFile("/sys/fs/ext4/vda/trigger_fs_error", []byte("a test"), 0o200); err != nil {
		return err
	}
	time.Sleep(time.Second) // the kernel counts it a moment later
	report, err := fsops.Stat(root, false)
	fmt.Println("REPORT", report.Abnormal, report.Message)
	return err
}
