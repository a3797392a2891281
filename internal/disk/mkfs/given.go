package mkfs

import (
	"context"
	"io"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// ownMarks are the marks of the filesystems that are recognized by their superblock alone.
var ownMarks = map[string]mark{"ext2": extMark, "ext3": extMark, "ext4": extMark, "xfs": xfsMark, "btrfs": btrfsMark}

// checkGiven examines a device from a driver that defers by itself. The driver is responsible
// for the contents, but a sandbox could not mount a blank device or another filesystem. If the
// expected superblock is found, nothing else is read.
func (j *job) checkGiven(ctx context.Context) error {
	own, known := ownMarks[j.req.FSType]
	if known {
		if marked, err := j.bears(own); marked || err != nil {
			return err
		}
	}
	found, err := j.dev.look(ctx, true)
	switch {
	case err != nil:
		return err
	case found.blank(j.f.cfg.AcceptLeftovers):
		return j.dev.errorf(unmet, "is blank, but a driver that defers by itself must hand over a device that holds %s: "+
			"check the driver's log; until the driver is fixed, exclude the volume by a policy rule", j.req.FSType)
	case !known:
		return nil
	}
	what := found.signatures()
	if what == "" {
		what = "no known signature"
	}
	return j.dev.errorf(unmet, "holds %s, but the driver, which defers by itself, reports %s: correct the filesystem "+
		"type that it reports, or the device", what, j.req.FSType)
}

// bears reports whether the device has a mark. It opens the device without O_EXCL.
func (j *job) bears(m mark) (bool, error) {
	file, err := j.dev.open(unix.O_RDONLY | unix.O_DIRECT)
	if err != nil {
		return false, err
	}
	defer closeFile(file)
	size, err := file.Seek(0, io.SeekEnd)
	place := extent{start: m.at &^ (grain - 1), length: grain}
	if err != nil || size < place.start+grain {
		return false, nil //nolint:nilerr // the whole look will say what is wrong
	}
	buffer, err := newAligned(grain)
	if err != nil {
		return false, j.dev.errorf(volume.Internal, "cannot be read: %w", err)
	}
	defer buffer.free()
	data, err := buffer.read(file, place, size)
	if err != nil {
		return false, j.dev.errorf(volume.Internal, "cannot be read at byte %d: %w", place.start, err)
	}
	return m.within(data, place.start), nil
}
