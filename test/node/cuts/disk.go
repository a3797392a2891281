package cuts

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"

	"golang.org/x/sys/unix"
)

// BlockSize is what a disk writes whole or not at all. With sectors of 512 bytes that may be torn apart, ext4 loses its
// own superblock, which no sync of a program's can help.
const BlockSize = 4096

// write is one in the disk's cache.
type write struct {
	offset int64
	data   []byte
}

// Disk is a disk at a moment: what is on it, and what is in its cache.
type Disk struct {
	data  []byte // a mapping, of which most was never touched
	used  []bool // blocks that are not zero
	cache []write
	next  int // entry of the log
}

// OpenDisk reads an image, before a machine writes to it.
func OpenDisk(image string) (*Disk, error) {
	file, err := os.Open(image) //nolint:gosec // a test's own
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	data, err := unix.Mmap(-1, 0, int(info.Size()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, err
	}
	d := &Disk{data: data, used: make([]bool, info.Size()/BlockSize)}
	for at := int64(0); ; {
		from, err := unix.Seek(int(file.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return d, nil
		}
		if err == nil {
			at, err = unix.Seek(int(file.Fd()), from, unix.SEEK_HOLE)
		}
		if err == nil {
			_, err = file.ReadAt(d.data[from:at], from)
		}
		if err != nil {
			return nil, errors.Join(err, d.Close())
		}
		d.touch(from, at)
	}
}

// Close frees it.
func (d *Disk) Close() error { return unix.Munmap(d.data) }

var zeros [BlockSize]byte

// touch notes what a range has now.
func (d *Disk) touch(from, to int64) {
	for block := from / BlockSize; block*BlockSize < to; block++ {
		d.used[block] = !bytes.Equal(d.data[block*BlockSize:][:BlockSize], zeros[:])
	}
}

// Advance has the disk take the entries of a log up to one, which it does not take.
func (d *Disk) Advance(l *Log, to int) error {
	for ; d.next < to; d.next++ {
		e := l.Entries[d.next]
		if e.Flush {
			for _, w := range d.cache {
				copy(d.data[w.offset:], w.data)
				d.touch(w.offset, w.offset+int64(len(w.data)))
			}
			d.cache = nil
			continue
		}
		data, err := l.Data(e)
		if err != nil {
			return err
		}
		d.cache = append(d.cache, write{e.Offset, data})
	}
	return nil
}

// Cut writes into a file what is on the disk after the power was cut: of the cache a random part, which may be nothing
// or nearly all, and one write of which some blocks are lost.
func (d *Disk) Cut(r *rand.Rand, into *os.File) error {
	if err := unix.Fallocate(int(into.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, int64(len(d.data))); err != nil {
		return err
	}
	for block := 0; block < len(d.used); block++ {
		first := block
		for block < len(d.used) && d.used[block] {
			block++
		}
		if _, err := into.WriteAt(d.data[first*BlockSize:block*BlockSize], int64(first)*BlockSize); err != nil {
			return err
		}
	}
	for _, w := range d.survivors(r) {
		if _, err := into.WriteAt(w.data, w.offset); err != nil {
			return err
		}
	}
	return nil
}

// survivors are the writes in the cache that reach the disk.
func (d *Disk) survivors(r *rand.Rand) (left []write) {
	share, torn := r.IntN(4), r.IntN(len(d.cache)+1)
	for i, w := range d.cache {
		if i == torn {
			for _, block := range blocks(w) {
				if r.IntN(2) == 0 {
					left = append(left, block)
				}
			}
		} else if r.IntN(4) < share {
			left = append(left, w)
		}
	}
	return left
}

// blocks cuts a write at the borders of blocks.
func blocks(w write) (all []write) {
	for len(w.data) > 0 {
		size := min(int64(len(w.data)), BlockSize-w.offset%BlockSize)
		all = append(all, write{w.offset, w.data[:size]})
		w.offset, w.data = w.offset+size, w.data[size:]
	}
	return all
}
