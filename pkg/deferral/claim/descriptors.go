package claim

import (
	"context"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/openers"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Keeper keeps descriptors over a restart of the daemon, as systemd's file-descriptor store does. RemoveFD returns only
// when the keeper has closed its copy: until then the device stays claimed.
type Keeper interface {
	StoreFD(name string, file *os.File) error
	RemoveFD(name string) error
}

// heldDevice is a block device held open for its owners.
type heldDevice struct {
	fd     int
	device volume.Device
	// mountable is set if fd is a plain descriptor, so that this node's kernel can
	// mount the device for a sandbox. Otherwise fd was opened with O_EXCL.
	mountable bool
	// wasReadOnly is the device's own read-only flag before its first owner.
	wasReadOnly bool
}

// descriptors are the open descriptors of claimed devices, here and with the keeper.
type descriptors struct {
	keeper  Keeper
	openers Openers

	mu   sync.Mutex
	held map[identity]*heldDevice
	// kept are the keeper's descriptors from before the start that no volume has
	// claimed yet, by claimName. They hold their devices until they are dropped.
	kept map[string]*os.File
}

// claimName is the name of a claim with the keeper: the device number in base 36.
// systemd passes the names of all claims in one environment variable, for which the
// kernel has 128 KiB. Upper case keeps them apart from the names of sockets.
func claimName(id identity) string {
	if !id.Block {
		return "" // an image: the keeper has nothing of it
	}
	return strings.ToUpper(strconv.FormatUint(uint64(id.Major)<<20|uint64(id.Minor), 36))
}

func (d *descriptors) get(id identity) *heldDevice {
	d.mu.Lock()
	defer d.mu.Unlock()
	if held := d.held[id]; held != nil {
		return new(*held)
	}
	return nil
}

// add records a held device and stores a copy with the keeper. A plain descriptor is not
// stored: it keeps nobody out, and a driver's detach would have to wait for the copy. After
// an error call release: the keeper may have stored the copy nevertheless.
func (d *descriptors) add(id identity, held *heldDevice) error {
	d.mu.Lock()
	d.held[id] = held
	d.mu.Unlock()
	if d.keeper == nil || held.mountable {
		return nil
	}
	fd, err := unix.FcntlInt(uintptr(held.fd), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return volume.Errorf(volume.Internal, "device %s: the claim cannot be kept: %w", held.device, err)
	}
	file := os.NewFile(uintptr(fd), claimName(id))
	err = d.keeper.StoreFD(claimName(id), file)
	_ = file.Close()
	if err != nil {
		return volume.Errorf(volume.Internal, "device %s: the claim cannot be kept over a restart: %w", held.device, err)
	}
	return nil
}

// keptFile returns the kept descriptor of a device, or nil.
func (d *descriptors) keptFile(id identity) *os.File {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.kept[claimName(id)]
}

// adopt records a held device whose descriptor was copied from the kept one.
func (d *descriptors) adopt(id identity, held *heldDevice) {
	d.mu.Lock()
	defer d.mu.Unlock()
	_ = d.kept[claimName(id)].Close()
	d.held[id] = held
	delete(d.kept, claimName(id))
}

// release closes the descriptor of a device, and the keeper's copy. If the keeper fails,
// the device stays held, so that a repeated release asks the keeper again.
func (d *descriptors) release(id identity) error {
	held := d.get(id)
	if held == nil {
		return nil
	}
	if d.keeper != nil && !held.mountable {
		if err := d.keeper.RemoveFD(claimName(id)); err != nil {
			return volume.Errorf(volume.Busy, "device %s: the kept claim cannot be given up yet: %w", held.device, err)
		}
	}
	d.mu.Lock()
	delete(d.held, id)
	d.mu.Unlock()
	mark := d.openers.Mark(held.fd)
	sys.CloseAlone(held.fd)
	// A driver that detaches the device right after us must not find it busy by a copy of the descriptor: systemd closes
	// its own in a thread, and a program that is being started has one until a moment after it runs.
	ctx := context.Background()
	if d.openers.AwaitClosed(ctx, mark, ReleaseTime) || held.mountable {
		return nil
	}
	// If it stays busy, somebody else has it by now.
	fd, _ := openFree(ctx, ReleaseTime, func() (int, error) { return openByIdentity(held.device, unix.O_EXCL) })
	sys.CloseAlone(fd)
	return nil
}

// question is about a device that is open here, with a copy of a descriptor, which is no further open, or is opened for
// it.
func (d *descriptors) question(of volume.Device) (q openers.Query, err error) {
	id, from := identityOf(of), uintptr(0)
	d.mu.Lock()
	if kept := d.kept[claimName(id)]; kept != nil {
		from, q.Claimed = kept.Fd(), true
		q.Own++
	}
	if held := d.held[id]; held != nil {
		from, q.Claimed = uintptr(held.fd), q.Claimed || !held.mountable
		q.Own++
	}
	if q.Own > 0 {
		q.FD, err = unix.FcntlInt(from, unix.F_DUPFD_CLOEXEC, 3)
	}
	d.mu.Unlock()
	if q.Own == 0 {
		q.Own = 1
		q.FD, err = openAgain(of)
	}
	return q, err
}

// keptExcept returns the kept descriptors by claim name, without the wanted ones.
func (d *descriptors) keptExcept(wanted map[string]bool) map[string]*os.File {
	d.mu.Lock()
	defer d.mu.Unlock()
	others := maps.Clone(d.kept)
	maps.DeleteFunc(others, func(name string, _ *os.File) bool { return wanted[name] })
	return others
}

// dropKept closes a kept descriptor, here and with the keeper.
func (d *descriptors) dropKept(name string) {
	d.mu.Lock()
	file := d.kept[name]
	delete(d.kept, name)
	inUse := false
	for id, held := range d.held {
		inUse = inUse || claimName(id) == name && !held.mountable
	}
	d.mu.Unlock()
	if file == nil {
		return // it was adopted meanwhile
	}
	sys.CloseFileAlone(file)
	if d.keeper != nil && !inUse {
		// If this fails, the kernel still refuses a second owner, and the next restart tries again.
		_ = d.keeper.RemoveFD(name)
	}
}

// identities lists the held devices.
func (d *descriptors) identities() []identity {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Collect(maps.Keys(d.held))
}

func (d *descriptors) count() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := len(d.kept)
	for _, held := range d.held {
		if !held.mountable {
			n++
		}
	}
	return n
}

func (d *descriptors) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for id, held := range d.held {
		sys.CloseAlone(held.fd)
		delete(d.held, id)
	}
	for name, file := range d.kept {
		_ = file.Close()
		delete(d.kept, name)
	}
}
