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

// Disk is a block device or a file of the host in the machine.
type Disk struct {
	// Serial is how the guest finds it.
	Serial string

	file     *os.File
	set      int
	readOnly bool
}

// SerialSize is how much of a disk's serial number a guest sees.
const SerialSize = 20

// maxDisks is what is free on the machine's bus.
const maxDisks = 24

func (d *Disk) node() string   { return "node-" + d.Serial }
func (d *Disk) device() string { return "disk-" + d.Serial }

type object = map[string]any

// Plug gives the machine an open block device, or a file, which is the machine's from now on also
// where it fails. The calls for disks must not overlap.
func (m *Machine) Plug(ctx context.Context, serial string, file *os.File, readOnly bool) (*Disk, error) {
	d := &Disk{Serial: serial, file: file, readOnly: readOnly}
	if err := m.plug(ctx, d); err != nil {
		return nil, errors.Join(err, m.takeBack(ctx, d))
	}
	return d, nil
}

func (m *Machine) plug(ctx context.Context, d *Disk) error {
	if len(d.Serial) > SerialSize || m.disks[d.Serial] != nil {
		return fmt.Errorf("%q cannot be the serial number of a new disk", d.Serial)
	}
	if len(m.disks) >= maxDisks {
		return fmt.Errorf("the machine has no place for more than %d disks", maxDisks)
	}
	m.sets++
	d.set = m.sets
	m.mu.Lock()
	m.disks[d.Serial] = d
	m.mu.Unlock()
	if err := m.qmp.execute(ctx, "add-fd", object{"fdset-id": d.set}, d.file); err != nil {
		return err
	}
	info, err := d.file.Stat()
	if err != nil {
		return err
	}
	driver := "host_device"
	if info.Mode().IsRegular() {
		driver = "file"
	}
	if err := m.qmp.execute(ctx, "blockdev-add", object{
		"driver": driver, "node-name": d.node(), "filename": "/dev/fdset/" + strconv.Itoa(d.set),
		"read-only": d.readOnly, "auto-read-only": false, "discard": "unmap", "locking": "on",
		"cache": object{"direct": driver == "host_device", "no-flush": false},
	}, nil); err != nil {
		return err
	}
	return m.qmp.execute(ctx, "device_add", object{
		"driver": "virtio-blk-pci", "id": d.device(), "drive": d.node(), "serial": d.Serial, "bus": "pci.0",
	}, nil)
}

// unplugAgain is how long the guest may take before it is asked again.
const unplugAgain = 5 * time.Second

// Unplug takes a disk out. The guest must not use it any more.
func (m *Machine) Unplug(ctx context.Context, d *Disk) error {
	gone := m.qmp.awaitGone(d.device())
	for {
		// That the guest was asked already is an error, too: it is waited for.
		if err := m.qmp.execute(ctx, "device_del", object{"id": d.device()}, nil); errors.Is(err, errNoDevice) {
			return m.takeBack(ctx, d) // it left when nobody waited for it any more
		}
		select {
		case <-gone:
			return m.takeBack(ctx, d)
		case <-m.qmp.closed:
			return m.qmp.err
		case <-ctx.Done():
			return fmt.Errorf("the guest does not let go of the disk: %w", ctx.Err())
		case <-time.After(unplugAgain):
		}
	}
}

// takeBack removes what is left of a disk that no device shows.
func (m *Machine) takeBack(ctx context.Context, d *Disk) error {
	if m.disks[d.Serial] != d {
		return d.file.Close() // QEMU never saw it
	}
	// One that QEMU does not have is what is wanted.
	_ = m.qmp.execute(ctx, "blockdev-del", object{"node-name": d.node()}, nil)
	if err := m.qmp.execute(ctx, "remove-fd", object{"fdset-id": d.set}, nil); err != nil && ctx.Err() != nil {
		return err
	}
	m.mu.Lock()
	delete(m.disks, d.Serial)
	m.mu.Unlock()
	return d.file.Close()
}

// Resize tells the machine that the host's device has grown, and gives its size.
func (m *Machine) Resize(ctx context.Context, d *Disk) (int64, error) {
	size, err := unix.Seek(int(d.file.Fd()), 0, unix.SEEK_END)
	if err != nil {
		return 0, fmt.Errorf("the size of the device cannot be told: %w", err)
	}
	return size, m.qmp.execute(ctx, "block_resize", object{"node-name": d.node(), "size": size}, nil)
}
