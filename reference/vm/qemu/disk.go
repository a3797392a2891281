package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// Disk is a block device of the host in the machine.
type Disk struct {
	// Serial identifies it in the guest.
	Serial string

	file     *os.File
	set      int
	readOnly bool
}

// SerialSize is the maximum length of a serial number of virtio-blk.
const SerialSize = 20

// maxDisks is the number of free slots on the machine's bus.
const maxDisks = 24

func (d *Disk) node() string   { return "node-" + d.Serial }
func (d *Disk) device() string { return "disk-" + d.Serial }

type object = map[string]any

// Plug plugs in an open block device, and owns it from now on, even if it fails. Plug,
// Unplug and Resize must not be called concurrently.
func (m *Machine) Plug(ctx context.Context, serial string, file *os.File, readOnly bool) (*Disk, error) {
	d := &Disk{Serial: serial, file: file, readOnly: readOnly}
	if err := m.plug(ctx, d); err != nil {
		return nil, errors.Join(err, m.removeDisk(ctx, d))
	}
	return d, nil
}

func (m *Machine) plug(ctx context.Context, d *Disk) error {
	if len(d.Serial) > SerialSize || m.disks[d.Serial] != nil {
		return fmt.Errorf("%q cannot be the serial number of a new disk", d.Serial)
	}
	if len(m.disks) >= maxDisks {
		return fmt.Errorf("the machine has no slot for more than %d disks", maxDisks)
	}
	m.sets++
	d.set = m.sets
	m.mu.Lock()
	m.disks[d.Serial] = d
	m.mu.Unlock()
	if err := m.qmp.execute(ctx, "add-fd", object{"fdset-id": d.set}, d.file); err != nil {
		return err
	}
	if err := m.qmp.execute(ctx, "blockdev-add", object{
		"driver": "host_device", "node-name": d.node(), "filename": "/dev/fdset/" + strconv.Itoa(d.set),
		"read-only": d.readOnly, "auto-read-only": false, "discard": "unmap", "locking": "on",
		"cache": object{"direct": true, "no-flush": false},
	}, nil); err != nil {
		return err
	}
	return m.qmp.execute(ctx, "device_add", object{
		"driver": "virtio-blk-pci", "id": d.device(), "drive": d.node(), "serial": d.Serial, "bus": "pci.0",
		"werror": "report", // by default QEMU stops the machine, with all of its disks, when one of them has no space
	}, nil)
}

// unplugRetry is how long the guest may take before the request is repeated.
const unplugRetry = 5 * time.Second

// Unplug removes a disk, which the guest must not use any more.
func (m *Machine) Unplug(ctx context.Context, d *Disk) error {
	deleted := m.qmp.deleted(d.device())
	for {
		// QEMU refuses a repeated request while an earlier one is pending: ignore that error.
		if err := m.qmp.execute(ctx, "device_del", object{"id": d.device()}, nil); errors.Is(err, errNoDevice) {
			return m.removeDisk(ctx, d) // an earlier request has completed
		}
		select {
		case <-deleted:
			return m.removeDisk(ctx, d)
		case <-m.qmp.closed:
			return m.qmp.err
		case <-ctx.Done():
			return fmt.Errorf("the guest does not release the disk: %w", ctx.Err())
		case <-time.After(unplugRetry):
		}
	}
}

// removeDisk removes what is left of a disk without a device.
func (m *Machine) removeDisk(ctx context.Context, d *Disk) error {
	if m.disks[d.Serial] != d {
		return d.file.Close() // QEMU never saw it
	}
	// It fails if QEMU does not have the node, which is fine.
	_ = m.qmp.execute(ctx, "blockdev-del", object{"node-name": d.node()}, nil)
	if err := m.qmp.execute(ctx, "remove-fd", object{"fdset-id": d.set}, nil); err != nil && ctx.Err() != nil {
		return err
	}
	m.mu.Lock()
	delete(m.disks, d.Serial)
	m.mu.Unlock()
	return d.file.Close()
}

// Resize passes the new size of the host's device to the machine, and returns it, unless accept refuses the size.
func (m *Machine) Resize(ctx context.Context, d *Disk, accept func(size int64) error) (int64, error) {
	size, err := unix.Seek(int(d.file.Fd()), 0, unix.SEEK_END)
	if err != nil {
		return 0, fmt.Errorf("the size of the device cannot be read: %w", err)
	}
	if err := accept(size); err != nil {
		return 0, err
	}
	return size, m.qmp.execute(ctx, "block_resize", object{"node-name": d.node(), "size": size}, nil)
}
