// Package ondisk reads the superblocks of volumes on the host, while sandboxes have the
// filesystems mounted. Each request for stats needs them, so it reads a device rarely, and
// no caller waits for a device that hangs.
package ondisk

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/disk/superblock"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
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
	open func(volume.Device) (file io.ReaderAt, closeFile func(), err error)

	mu          sync.Mutex
	states      map[volume.Key]*state
	quick, hung int // how many reads are under way
}

// state is what is known about one volume.
type state struct {
	super *superblock.Super // nil if it could not be read
	at    time.Time
	ends  chan struct{} // closed when the read under way ends; nil if there is none
}

// New makes a reader of real devices.
func New() *Reader {
	return newReader(func(d volume.Device) (io.ReaderAt, func(), error) {
		file, err := claim.OpenDevice(d)
		return file, func() { sys.CloseFileAlone(file) }, err
	})
}

func newReader(open func(volume.Device) (io.ReaderAt, func(), error)) *Reader {
	return &Reader{open: open, states: make(map[volume.Key]*state)}
}

// Super returns the volume's superblock, read at most maxAge ago if the device answers. It
// returns nil if there is none of the volume's filesystem, or the device cannot be read.
func (r *Reader) Super(ctx context.Context, v *volume.Volume, maxAge time.Duration) *superblock.Super {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.states[v.Key]
	if s == nil {
		s = &state{}
		r.states[v.Key] = s
	}
	if !s.at.IsZero() && time.Since(s.at) < maxAge {
		return s.super
	}
	if s.ends == nil {
		r.start(v, s)
	}
	if ends := s.ends; ends != nil {
		r.mu.Unlock()
		waiting, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		select {
		case <-ends:
		case <-waiting.Done():
		}
		r.mu.Lock()
	}
	return s.super
}

// start begins a read, unless too many are under way. The caller has r.mu.
func (r *Reader) start(v *volume.Volume, s *state) {
	if r.quick == maxReads {
		return
	}
	r.quick++
	ends := make(chan struct{})
	s.ends = ends
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
			super = s.super // what was read before still counts
		}
		s.super, s.at, s.ends = super, time.Now(), nil
		r.mu.Unlock()
		close(ends)
	}()
}

func (r *Reader) read(d volume.Device, fsType string) (*superblock.Super, error) {
	file, closeFile, err := r.open(d)
	if err != nil {
		return nil, err
	}
	defer closeFile()
	return superblock.Read(file, fsType)
}

// Forget drops what is known about a volume that was released.
func (r *Reader) Forget(key volume.Key) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.states, key)
}
