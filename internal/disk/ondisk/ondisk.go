// Package ondisk reads the superblocks of volumes on the host, while sandboxes have the filesystems mounted. Each
// request for stats needs them, so it reads a device rarely, and no caller waits for a device that hangs.
package ondisk

import (
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
	// maxHung bounds the reads that take longer than patience, each of which goes on until the kernel gives up, and
	// maxReads all that are under way. Beyond the bounds no device is read.
	maxHung  = 64
	maxReads = maxHung + 8
	// patience is how long a caller waits for a read.
	patience = 200 * time.Millisecond
)

// Reader reads superblocks. Many goroutines may use one.
type Reader struct {
	open  func(volume.Device) (file io.ReaderAt, closeFile func(), err error)
	reads sys.Looks[*state]
	slots chan struct{} // has a token for each read under way
	known sync.Map      // of *state by volume.Key
}

// state is what is known about one volume.
type state struct {
	mu    sync.Mutex
	super *superblock.Super // nil if it could not be read
	at    time.Time
}

// New makes a reader of real devices.
func New() *Reader {
	return newReader(func(d volume.Device) (io.ReaderAt, func(), error) {
		file, err := claim.OpenDevice(d)
		return file, func() { sys.CloseFileAlone(file) }, err
	})
}

func newReader(open func(volume.Device) (io.ReaderAt, func(), error)) *Reader {
	return &Reader{open: open, reads: sys.Looks[*state]{Time: patience, Most: maxHung}, slots: make(chan struct{}, maxReads)}
}

// Super returns the volume's superblock, read at most maxAge ago if the device answers. It
// returns nil if there is none of the volume's filesystem, or the device cannot be read.
func (r *Reader) Super(v *volume.Volume, maxAge time.Duration) *superblock.Super {
	of, _ := r.known.LoadOrStore(v.Key, &state{})
	s, _ := of.(*state)
	super, fresh := s.get(maxAge)
	if fresh {
		return super
	}
	device, fsType := v.Device, v.FSType
	_, err := sys.Look(&r.reads, s, func() (any, error) {
		if _, fresh := s.get(maxAge); !fresh { // another caller may have read it meanwhile
			r.read(device, fsType, s)
		}
		return nil, nil //nolint:nilnil // the state has it
	})
	if err == nil {
		super, _ = s.get(maxAge)
	}
	return super
}

func (s *state) get(maxAge time.Duration) (super *superblock.Super, fresh bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.super, !s.at.IsZero() && time.Since(s.at) < maxAge
}

// read reads a device, unless too many reads are under way.
func (r *Reader) read(d volume.Device, fsType string, into *state) {
	select {
	case r.slots <- struct{}{}:
		defer func() { <-r.slots }()
	default:
		return
	}
	var super *superblock.Super
	file, closeFile, err := r.open(d)
	if err == nil {
		super, err = superblock.Read(file, fsType)
		closeFile()
	}
	into.mu.Lock()
	defer into.mu.Unlock()
	into.at = time.Now()
	if err == nil || errors.Is(err, superblock.ErrNone) { // else what was read before still counts
		into.super = super
	}
}

// Forget drops what is known about a volume that was released.
func (r *Reader) Forget(key volume.Key) { r.known.Delete(key) }
