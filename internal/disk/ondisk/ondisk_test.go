package ondisk

import (
	"errors"
	"io"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/disk/superblock"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// disk is a device that may hang, or be broken. Where it is whole it holds an
// ext4 of as many inodes as it was opened before.
type disk struct {
	reads, open atomic.Int32
	hang        chan struct{}
	err         error
}

func (d *disk) ReadAt(p []byte, _ int64) (int, error) {
	n := d.reads.Load()
	if d.hang != nil {
		<-d.hang
	}
	if d.err != nil {
		return 0, d.err
	}
	clear(p)
	p[1024], p[1028] = byte(n), 1           // inodes, blocks
	p[1024+0x38], p[1024+0x39] = 0x53, 0xef // magic
	return len(p), nil
}

func (d *disk) opened() (io.ReaderAt, func(), error) {
	d.open.Add(1)
	d.reads.Add(1)
	return d, func() { d.open.Add(-1) }, nil
}

func readerOf(d *disk) *Reader {
	return newReader(func(volume.Device) (io.ReaderAt, func(), error) { return d.opened() })
}

func testVolume(key volume.Key) *volume.Volume { return &volume.Volume{Key: key, FSType: "ext4"} }

func inodes(s *superblock.Super) int64 {
	if s == nil {
		return -1
	}
	return s.Inodes
}

func TestADeviceIsReadRarely(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &disk{}
		r := readerOf(d)
		for range 100 {
			got := inodes(r.Super(testVolume("a"), time.Minute))
			check.Require(t, got == 1, "the read number %d", got)
		}
		time.Sleep(time.Minute)
		check.Equal(t, inodes(r.Super(testVolume("a"), time.Minute)), 2, "the number of the read, a minute later")
		time.Sleep(time.Minute)
		d.err = errors.New("I/O error")
		check.Equal(t, inodes(r.Super(testVolume("a"), time.Minute)), 2, "the number of the read, after one that failed")
		check.That(t, d.open.Load() == 0, "%d descriptors are left", d.open.Load())
		r.Forget("a")
		check.Equal(t, inodes(r.Super(testVolume("a"), time.Minute)), -1, "the number of the read, after it was forgotten")
	})
}

func TestADeviceThatHangsKeepsNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &disk{hang: make(chan struct{})}
		r := readerOf(d)
		for i := range maxHung + 8 {
			key := volume.Key(rune('a' + i))
			begin := time.Now()
			check.Equal(t, inodes(r.Super(testVolume(key), time.Minute)), -1, "what a device that hangs gave")
			r.Super(testVolume(key), time.Minute)
			took := time.Since(begin)
			check.That(t, took <= 2*patience, "%v were waited", took)
		}
		check.Equal(t, d.open.Load(), maxHung, "open devices")
		begin := time.Now()
		r.Super(testVolume("a"), time.Minute)
		check.Equal(t, time.Since(begin), 0, "how long a caller was kept by what hangs already")
		close(d.hang)
		synctest.Wait()
		got := inodes(r.Super(testVolume("a"), time.Minute))
		check.That(t, got >= 1 && d.open.Load() == 0, "when it answers again: read %d, %d descriptors", got, d.open.Load())
	})
}

func TestDevicesThatHangLeaveTheOthersTheirReads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hung, healthy := &disk{hang: make(chan struct{})}, &disk{}
		r := newReader(func(d volume.Device) (io.ReaderAt, func(), error) {
			if d.Path == "hung" {
				return hung.opened()
			}
			return healthy.opened()
		})
		for i := range maxHung - 1 { // one by one
			v := testVolume(volume.Key(rune('a' + i)))
			v.Device.Path = "hung"
			r.Super(v, time.Minute)
		}
		check.Equal(t, inodes(r.Super(testVolume("healthy"), time.Minute)), 1, "what a healthy device gave")
		close(hung.hang)
		synctest.Wait()
		got := inodes(r.Super(testVolume("healthy"), 0))
		check.That(t, got == 2 && hung.open.Load() == 0, "when they answer again: read %d, %d descriptors", got, hung.open.Load())
	})
}

// TestReadsAtOnceAreBounded before it is known that their devices hang.
func TestReadsAtOnceAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &disk{hang: make(chan struct{})}
		r := readerOf(d)
		for i := range 2 * maxReads {
			go r.Super(testVolume(volume.Key(rune('a'+i))), time.Minute)
		}
		synctest.Wait()
		check.Equal(t, d.open.Load(), maxReads, "open devices")
		close(d.hang)
	})
}
