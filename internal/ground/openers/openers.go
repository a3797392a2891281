// Package openers answers one question: does anybody besides the caller have a block device, or a disk image, open?
//
// The kernel counts that itself: block_device.bd_openers is how often a block device is open, by whatever
// name, in whatever namespace, and by the kernel's own users too (mounts, loop devices, device mapper). A
// descriptor that is passed in a socket, a mapping whose descriptor is closed, or a file that is registered
// with io_uring, each keep the device open, and so count. A copy of a descriptor (dup, fork, systemd's
// descriptor store) is no second open, and a descriptor that only names the device (O_PATH) is none. Of a
// regular file, inode.i_writecount is how often it is open for writing.
//
// A small BPF program reads the count, at constant cost whatever the node's processes have open. It takes CAP_SYS_ADMIN
// (or CAP_BPF and CAP_PERFMON) and a kernel that describes its structures (/sys/kernel/btf). Where it cannot be had,
// package scan reads the descriptors of all processes instead; its comment tells what it does not see.
package openers

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/openers/scan"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// Query asks who has a device open besides the caller.
type Query struct {
	// FD is a descriptor of the device, and not only of its name (O_PATH). That of an image is
	// open for reading only, and its position changes.
	FD int
	// Own is how often the caller has the block device open, FD included.
	Own int
	// Claimed is set if the caller has the block device open with O_EXCL: the kernel has not.
	Claimed bool
	// Beside are devices of the caller's other volumes that lie on the device, or on what that lies
	// on. They do not count.
	Beside []File
	// Expected are loop devices that others may use although nobody has them open. One that lies on the device counts.
	Expected []File
	// Stack are other devices with the same data, such as the disk of a partition. Loop devices over them count.
	Stack []File
	// Servers are programs that serve devices and so have them open, such as rbd-nbd. They do not count.
	Servers []string
}

// Users are who has a device open besides the caller.
type Users struct {
	// Names tells a person who they are; "" is nobody.
	Names string
	// Kernel is set if no process was found among them, and none can have been missed, or the kernel is known to be one.
	Kernel bool
}

// Finder answers queries. Many goroutines may use one.
type Finder struct {
	count *counter // nil if the scan is in force, because of why
	why   error
	scan  *scanning
}

// New makes a finder that counts, or that scans if that is not possible.
func New() *Finder {
	f := NewScanner(nil)
	f.count, f.why = newCounter()
	return f
}

// NewScanner makes a finder that scans, for the given reason.
func NewScanner(why error) *Finder {
	f := &Finder{why: why}
	f.scan = &scanning{scan.New(), f.Layers}
	return f
}

// Method is how a finder proves that nobody has a device open.
type Method string

// The methods.
const (
	Counts Method = "count"
	Scans  Method = "scan"
)

// Method returns the method that is in force and, for a scan, why the kernel's count is not.
func (f *Finder) Method() (Method, error) {
	if f.count != nil {
		return Counts, nil
	}
	return Scans, f.why
}

// Blind returns why a scan does not see the node's processes, or nil. While it returns an error, no query is answered.
func (f *Finder) Blind() error {
	if f.count != nil {
		return nil
	}
	return f.scan.processes.Blind()
}

// found is what a look finds.
type found struct {
	count int
	users func() Users // names them, which takes longer
}

// Await waits at most patience until nobody but the caller has the device open. It returns who has
// it then. An error means that the answer is not known.
func (f *Finder) Await(ctx context.Context, q Query, patience time.Duration) (Users, error) {
	deadline := time.Now().Add(patience)
	pause := time.Millisecond
	if f.count == nil {
		pause *= 5 // a scan costs more
	}
	for first := true; ; first = false {
		last := !time.Now().Before(deadline)
		others, err := f.look(ctx, q, first || last)
		if err == nil && others.count == 0 {
			return Users{}, nil
		}
		if last || !sys.Sleep(ctx, pause) {
			if err != nil {
				return Users{}, err
			}
			return others.users(), nil
		}
		pause = min(2*pause, 50*time.Millisecond)
	}
}

// Holders lists the processes besides the caller that have the device of a query open, without the
// servers. It proves nothing.
func (f *Finder) Holders(ctx context.Context, q Query) ([]Holder, error) {
	var st unix.Stat_t
	if err := unix.Fstat(q.FD, &st); err != nil {
		return nil, err
	}
	file := FileOf(&st)
	if f.count == nil {
		return f.scan.holders(ctx, &q, file)
	}
	got, err := f.count.others(&q, file)
	if errors.Is(err, errLoopDriver) {
		return f.scan.holders(ctx, &q, file)
	}
	if err != nil {
		return nil, err
	}
	have, err := f.count.holders(ctx, &got.count, got.others)
	return slices.DeleteFunc(have.processes, func(h Holder) bool { return slices.Contains(q.Servers, h.Program) }), err
}

// OpenProcess opens a pidfd of a process, and reads its names. The caller closes it.
func (f *Finder) OpenProcess(of Holder) (*Process, error) {
	if f.count != nil {
		if err := InFirstNamespace(); err != nil {
			return nil, err
		}
	}
	return openProcess(of)
}

// look looks once. Idle has it look for loop devices that nobody uses, which costs more.
func (f *Finder) look(ctx context.Context, q Query, idle bool) (found, error) {
	var st unix.Stat_t
	if err := unix.Fstat(q.FD, &st); err != nil {
		return found{}, err
	}
	file := FileOf(&st)
	if f.count == nil {
		return f.scan.look(ctx, q, file)
	}
	others, err := f.count.look(ctx, q, file, idle)
	if errors.Is(err, errLoopDriver) {
		return f.scan.look(ctx, q, file)
	}
	return others, err
}

// Layers returns the device and, if it is a loop device, what is under it: other loop devices, and at
// last an image or another block device. All of them are one disk. With an error, some are missing. fd is a
// descriptor of the device, or sys.NoFD.
func (f *Finder) Layers(file File, fd int) ([]File, error) {
	layers := []File{file}
	for len(layers) < maxLayers {
		if !IsLoop(file) {
			return layers, nil
		}
		below, err := f.under(file, fd)
		switch {
		case err == nil:
			layers, file, fd = append(layers, below), below, sys.NoFD
		case IsNoDevice(err):
			return layers, nil // it has no backing
		default:
			return layers, fmt.Errorf("the image of loop device %d cannot be read: %w", file.Minor, err)
		}
	}
	return layers, fmt.Errorf("more than %d loop devices are stacked", maxLayers)
}

// under returns what a loop device lies on. It is read from the kernel's memory, if possible: the loop
// driver asks the image's filesystem.
func (f *Finder) under(loop File, fd int) (File, error) {
	if f.count != nil {
		got, err := lookAt(loop, fd, func(fd int) (count, error) { return f.count.count(fd, loop) })
		if err == nil && len(got.inodes) == 1 {
			err = unix.ENXIO
		}
		if err == nil && got.under != (File{}) || err != nil && !errors.Is(err, errLoopDriver) {
			return got.under, err
		}
	}
	info, err := lookAt(loop, fd, unix.IoctlLoopGetStatus64)
	if err != nil {
		return File{}, err
	}
	if info.Rdevice != 0 {
		return File{Block: true, Major: unix.Major(info.Rdevice), Minor: unix.Minor(info.Rdevice)}, nil
	}
	return File{Major: unix.Major(info.Device), Minor: unix.Minor(info.Device), Inode: info.Inode}, nil
}
