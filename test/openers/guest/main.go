// Command guest is the first process of a virtual machine. It opens devices in several ways, and
// prints how often the guest's kernel counts each.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/openers"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/reference/vm/initramfs"
	"github.com/crust-proxy/crust-proxy/test/check"
	tested "github.com/crust-proxy/crust-proxy/test/openers"
)

const (
	disk, first, second = "/dev/vda", "/dev/vda1", "/dev/vda2"
	// files is where the second partition is mounted. It has the modules.
	files = "/mnt"
)

func main() {
	if os.Getpid() != 1 {
		hold(os.Args[1])
		return
	}
	if err := run(context.Background()); err != nil {
		fmt.Println("FAILED:", err)
	}
	unix.Sync()
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
}

func run(ctx context.Context) error {
	if err := boot(); err != nil {
		return err
	}
	start := time.Now()
	f := openers.New()
	fmt.Println("New took", time.Since(start))
	method, why := f.Method()
	printFact("method", string(method), why)
	counts, err := tested.Partitions(ctx, f, disk, first, second)
	fmt.Print(counts)
	if err != nil {
		return err
	}
	g := &guest{ctx, f}
	g.count("a partition that nobody has", first)
	for _, part := range []func() error{g.process, g.mounts, g.loopDevices, g.deviceMapper} {
		if err := part(); err != nil {
			return err
		}
	}
	return nil
}

// printFact prints what was found, or the error.
func printFact(name string, is any, err error) {
	if err != nil {
		is = err
	}
	fmt.Printf("%s: %v\n", name, is)
}

// boot mounts what the kernel shows of itself, and waits for the disk.
func boot() error {
	for point, fs := range map[string]string{"/proc": "proc", "/sys": "sysfs", "/dev": "devtmpfs"} {
		if err := unix.Mount(fs, point, fs, 0, ""); err != nil {
			return fmt.Errorf("mount %s: %w", point, err)
		}
	}
	if err := initramfs.Load(initramfs.Boot); err != nil {
		return err
	}
	return check.Until(time.Minute, 10*time.Millisecond, func() error { _, err := os.Stat(second); return err })
}

var errTested = errors.New("it is tested")

type guest struct {
	ctx context.Context
	f   *openers.Finder
}

func (g *guest) count(name, device string) {
	n, err := tested.Count(g.ctx, g.f, device)
	printFact(name, n, err)
}

// users prints who has a file open besides this question.
func (g *guest) users(name string, f *openers.Finder, path string) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		printFact(name, nil, err)
		return
	}
	defer func() { _ = unix.Close(fd) }()
	users, err := f.Await(g.ctx, openers.Query{FD: fd, Own: 1, Claimed: true}, 0)
	printFact(name, fmt.Sprintf("%q", users.Names), err)
}

// process has this program, as another process, open the first partition.
func (g *guest) process() error {
	cmd := exec.Command("/init", first)
	input, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	output, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return err
	}
	_, err = output.Read(make([]byte, 1))
	fmt.Println("PID", cmd.Process.Pid)
	g.count("a partition that a process has", first)
	g.users("it is open in", g.f, first)
	g.users("by scan, it is open in", openers.NewScanner(errTested), first)
	return errors.Join(err, input.Close(), cmd.Wait())
}

// hold has a device open until the input ends.
func hold(device string) {
	fd, err := unix.Open(device, unix.O_RDWR|unix.O_CLOEXEC, 0)
	fmt.Println("open", err)
	_, _ = io.Copy(io.Discard, os.Stdin)
	_ = unix.Close(fd)
}

func (g *guest) mounts() error {
	if err := unix.Mount(second, files, "ext4", 0, ""); err != nil {
		return err
	}
	g.count("a mounted partition", second)
	g.users("a mounted partition is open in", g.f, second)
	g.count("the disk of a mounted partition", disk)
	return nil
}

// loopDevices: their driver is a module, which is loaded when the finder exists already.
func (g *guest) loopDevices() error {
	image := files + "/image"
	table := make([]byte, 1<<20)
	copy(table[446:], []byte{4: 0x83, 9: 1, 13: 1, 64: 0x55, 65: 0xaa}) // a partition of 128 KiB
	if err := errors.Join(load("loop", "max_part=7"), os.WriteFile(image, table, 0o600)); err != nil {
		return err
	}
	_, err := os.Stat("/sys/kernel/btf/loop")
	printFact("the module describes itself", err == nil, err)
	loop, err := loopdev.Attach(image, loopdev.Options{})
	if err != nil {
		return err
	}
	g.count("a loop device", loop)
	var st unix.Stat_t
	err = unix.Stat(loop+"p1", &st)
	part := openers.FileOf(&st)
	printFact("its partition is a loop device", fmt.Sprint(part, ": ", openers.IsLoop(part)), err)
	g.users("its image is open in", g.f, image)
	writer, err := os.OpenFile(image, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	g.count("with a writer of its image", loop)
	reader, err := os.Open(loop) //nolint:gosec // a path of the kernel's
	if err != nil {
		return err
	}
	g.count("and opened itself", loop)
	err = errors.Join(writer.Close(), reader.Close())
	g.count("and closed", loop)
	return errors.Join(err, loopdev.Detach(loop))
}

// deviceMapper compares the kernel's count of a device with that of device mapper.
func (g *guest) deviceMapper() error {
	if err := load("dm-mod", ""); err != nil {
		return err
	}
	const device = "/dev/dm-0"
	if err := createLinear(first); err != nil {
		return err
	}
	g.count("the partition below", first)
	g.users("the partition below is open in", g.f, first)
	g.count("a dm device", device)
	g.users("a dm device, by scan, is open in", openers.NewScanner(errTested), device)
	fd, err := unix.Open(device, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	mapped, err := unix.Mmap(fd, 0, 4096, unix.PROT_READ, unix.MAP_SHARED)
	if err = errors.Join(err, unix.Close(fd)); err != nil {
		return err
	}
	g.count("a dm device that is mapped", device)
	opens, err := openCount()
	printFact("and by device mapper", opens, err)
	g.users("and by scan it is open in", openers.NewScanner(errTested), device)
	err = unix.Munmap(mapped)
	g.count("and unmapped", device)
	return err
}

// load loads a module from the second partition.
func load(module, parameters string) error {
	file, err := os.Open(filepath.Join(files, module+".ko")) //nolint:gosec // of the test
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	if err := unix.FinitModule(int(file.Fd()), parameters, 0); err != nil {
		return fmt.Errorf("load %s: %w", module, err)
	}
	return nil
}
