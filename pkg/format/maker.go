package format

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// maker makes one kind of filesystem.
type maker struct {
	program program
	args    func(uuid string) []string
}

// arguments of each mkfs. None has a force option: each then refuses a device
// that is in use, and xfs and btrfs one that holds a filesystem, by their own
// check. ext4 goes without blocks reserved for root, as is usual for volumes, and
// leaves to the kernel that mounts it what can be initialized later.
var arguments = map[string]func(uuid string) []string{
	"ext4": func(uuid string) []string {
		return []string{"-q", "-m0", "-E", "lazy_itable_init=1,lazy_journal_init=1", "-U", uuid}
	},
	"xfs":   func(uuid string) []string { return []string{"-q", "-m", "uuid=" + uuid} },
	"btrfs": func(uuid string) []string { return []string{"-q", "-U", uuid} },
}

func (f *Formatter) maker(fsType string) (*maker, error) {
	args, ok := arguments[fsType]
	if !ok {
		return nil, deferral.Errorf(deferral.Invalid, "%s is not made here: only ext4, xfs and btrfs are; "+
			"make it yourself, or change the volume's filesystem type", fsType)
	}
	program, err := f.tool("mkfs." + fsType)
	if err != nil {
		return nil, err
	}
	return &maker{program: program, args: args}, nil
}

func newUUID() (string, error) {
	var b [16]byte
	if _, err := rand.Read(b[:]); err != nil {
		return "", err
	}
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:]), nil
}

// takeBack makes a device blank again on which mkfs failed, so that nobody takes
// for whole what it left, and the next attempt can begin anew. It does so where
// the device bears the UUID drawn for this very mkfs, or no signature at all, as
// before. Another filesystem is somebody else's, and stays; so does everything
// where mkfs could not have the device and wrote nothing.
func (j *job) takeBack(ctx context.Context, uuid string, cause error) error {
	if deferral.KindOf(cause) == deferral.Busy {
		return cause
	}
	found, err := j.look(ctx)
	if err != nil || !found.leftBy(uuid) {
		return cause
	}
	if err := j.clear(ctx, uuid); err != nil {
		return deferral.Errorf(deferral.KindOf(cause), "%w; what mkfs left on it could not be cleared (%w): "+
			"wipe it before the volume is used", cause, err)
	}
	return cause
}

func (c *contents) leftBy(uuid string) bool {
	return c.probe.nothing() || !c.probe.ambivalent && c.probe.tags["UUID"] == uuid
}

// clear writes zeros over the places that the look before mkfs found blank.
func (j *job) clear(ctx context.Context, uuid string) error {
	file, err := j.openAlone(ctx, unix.O_RDWR)
	if err != nil {
		return err
	}
	defer closeAlone(file)
	// Again, now that nobody else can come in between.
	now := &contents{}
	if now.probe, err = j.blkid(ctx); err != nil {
		return err
	}
	if !now.leftBy(uuid) {
		return j.errorf(unmet, "it has changed meanwhile")
	}
	size, err := file.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	for _, e := range windows(size) {
		if err := clearExtent(file, e, size); err != nil {
			return err
		}
	}
	return file.Sync()
}

// clearExtent writes only where there is something: on a thin device that is
// full, zeros cost room as well.
func clearExtent(file *os.File, e extent, size int64) error {
	buffer, err := newAligned(window)
	if err != nil {
		return err
	}
	defer buffer.free()
	data, err := buffer.read(file, e, size)
	if err != nil {
		return err
	}
	for at := int64(0); at < int64(len(data)); at += grain {
		piece := data[at:min(at+grain, int64(len(data)))]
		if len(bytes.TrimLeft(piece, "\x00")) == 0 {
			continue
		}
		clear(piece)
		if _, err := file.WriteAt(piece, e.start+at); err != nil {
			return err
		}
	}
	return nil
}
