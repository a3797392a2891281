package mkfs

import (
	"context"
	"errors"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/superblock"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// ownMarks are the marks of the filesystems that superblock reads.
var ownMarks = map[string]string{"ext2": extMark, "ext3": extMark, "ext4": extMark, "xfs": "xfs", "btrfs": "btrfs"}

// checkGiven looks at a device that a driver which defers by itself hands over: the driver
// is responsible for what is on it, but a sandbox could not mount a blank one, or one that
// holds something else. Where the superblock is in its place, no more than that is read.
func (j *job) checkGiven(ctx context.Context) error {
	file, err := j.dev.openAlone(ctx, unix.O_RDONLY)
	if err != nil {
		return err
	}
	_, err = superblock.Read(file, j.req.FSType)
	closeAlone(file)
	switch {
	case err == nil:
		return nil
	case !errors.Is(err, superblock.ErrNone):
		return j.dev.errorf(volume.Internal, "cannot be read: %w", err)
	}
	found, err := j.dev.look(ctx, true)
	if err != nil {
		return err
	}
	own := ownMarks[j.req.FSType]
	switch {
	case found.blank(j.f.cfg.AcceptLeftovers):
		return j.dev.errorf(unmet, "is blank, and the driver, which defers by itself, is to hand over a device that holds %s: "+
			"look at the driver's log; until it is mended, exclude the volume by a policy rule", j.req.FSType)
	case own == "" || slices.Contains(found.marks, own):
		return nil
	}
	what := found.signatures()
	if what == "" {
		what = "no known signature"
	}
	return j.dev.errorf(unmet, "holds %s, and the driver, which defers by itself, hands it over as %s: correct the filesystem "+
		"type that it gives, or the device", what, j.req.FSType)
}
