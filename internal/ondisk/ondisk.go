// Package ondisk reads, from the host, what volumes' filesystems say about
// themselves in their superblocks, while sandboxes have them mounted. It is
// asked with every question for stats, so it reads a device rarely and makes
// nobody wait for one that hangs.
package ondisk

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/superblock"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

const (
	// maxReads is how many devices are read at once, besides those that hang.
	maxReads = 8
	// maxHung bounds the reads that take longer than patience. Such a read goes on until
	// the kernel gives up. Beyond the bound, it counts among maxReads.
	maxHung = 64
	// patience is how long a caller waits for a read.
	patience = 200 * time.Millisecond
)

// Reader reads superblocks. Many goroutines may use one.
type Reader struct {
	open func(volume.Device) (Device, error)

	mu          sync.Mutex
	looks       map[volume.Key]*look
	quick, hung int // how many reads are under way
}

// Device is an open device.
type Device interface {
	io.ReaderAt
	io.Closer
}

// look is what is known of one volume.
type look struct {
	super *superblock.Super // nil where it could not be read
	at    time.Time
	ends  chan struct{} // closed when the read under way ends; nil where there is none
}

// New makes a reader of real devices.
func New() *Reader {
	return newReader(func(d volume.Device) (Device, error) { return claim.OpenDevice(d) })
}

func newReader(open func(volume.Device) (Device, error)) *Reader {
	return &Reader{open: open, looks: make(map[volume.Key]*look)}
}

// Super is what the volume's superblock said, at most maxAge ago where the device
// answers. It is nil where that is not known: no superblock of the volume's
// filesystem, or a device that cannot be read.
func (r *Reader) Super(ctx context.Context, v *volume.Volume, maxAge time.Duration) *superblock.Super {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.looks[v.Key]
	if l == nil {
		l = &look{}
		r.looks[v.Key] = l
	}
	if !l.at.IsZero() && time.Since(l.at) < maxAge {
		return l.super
	}
	if l.ends == nil {
		r.start(v, l)
	}
	if ends := l.ends; ends != nil {
		r.mu.Unlock()
		wait(ctx, ends)
		r.mu.Lock()
	}
	return l.super
}

func wait(ctx context.Context, ends <-chan struct{}) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	select {
	case <-ends:
	case <-ctx.Done():
	}
}

// start begins a read, unless too many are under way. The caller has r.mu.
func (r *Reader) start(v *volume.Volume, l *look) {
	if r.quick == maxReads {
		return
	}
	r.quick++
	ends := make(chan struct{})
	l.ends = ends
	count, ended := &r.quick, false // guarded by r.mu
	hangs := time.AfterFunc(patience, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if !ended && r.hung < maxHung {
			r.quick--
			r.hung++
			count = &r.hung
		}
	})
	device, fsType := v.Device, v.FSType
	go func() {
		super, err := r.read(device, fsType)
		hangs.Stop()
		r.mu.Lock()
		ended = true
		*count--
		if err != nil && !errors.Is(err, superblock.ErrNone) {
			super = l.super // what was read before still counts
		}
		l.super, l.at, l.ends = super, time.Now(), nil
		r.mu.Unlock()
		close(ends)
	}()
}

func (r *Reader) read(d volume.Device, fsType string) (*superblock.Super, error) {
	device, err := r.open(d)
	if err != nil {
		return nil, err
	}
	defer func() { _ = device.Close() }()
	return superblock.Read(device, fsType)
}

// Forget drops what is known of a volume that went away.
func (r *Reader) Forget(key volume.Key) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.looks, key)
}
