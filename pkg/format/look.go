package format

import (
	"bytes"
	"context"
	"io"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// contents is what a look at a device found.
type contents struct {
	probe          probe
	marks          []string // signatures that we know of ourselves
	dataAt         int64    // the first byte in the first or last MiB that is not zero; -1 means none
	unfinished     bool     // its mkfs says that it did not end
	writeProtected bool
}

// is tells whether the device holds this filesystem and nothing else.
func (c *contents) is(fsType string) bool {
	return !c.probe.ambivalent && c.probe.tags["TYPE"] == fsType && c.probe.tags["PTTYPE"] == ""
}

// blank tells whether the device holds nothing. leftovers lets bytes be that are
// part of no signature.
func (c *contents) blank(leftovers bool) bool {
	return c.probe.nothing() && len(c.marks) == 0 && (leftovers || c.dataAt < 0)
}

// signatures says what was found, in words; "" means none.
func (c *contents) signatures() string {
	said := c.probe.words()
	for _, mark := range c.marks {
		if !slices.Contains(said, mark) {
			said = append(said, mark)
		}
	}
	return strings.Join(said, ", ")
}

func orNothing(what string) string {
	if what == "" {
		return "nothing known"
	}
	return what
}

// look looks at the device while nobody else can have it.
func (j *job) look(ctx context.Context) (*contents, error) {
	file, err := j.openAlone(ctx, unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer closeAlone(file)
	found, err := j.read(file)
	if err != nil {
		return nil, err
	}
	found.probe, err = j.blkid(ctx)
	if err != nil {
		return nil, err
	}
	return found, nil
}

// read looks with our own eyes. blkid's "nothing found" also stands for "could
// not be read", and it looks through the page cache.
func (j *job) read(file *os.File) (*contents, error) {
	size, err := file.Seek(0, io.SeekEnd)
	if err != nil {
		return nil, j.errorf(deferral.Internal, "its size cannot be told: %w", err)
	}
	if size == 0 {
		return nil, j.errorf(deferral.NotFound, "has no size: has the driver attached it?")
	}
	protected, err := unix.IoctlGetInt(int(file.Fd()), unix.BLKROGET)
	if err != nil {
		return nil, j.errorf(deferral.Internal, "cannot be asked whether it is write-protected: %w", err)
	}
	found := &contents{dataAt: -1, writeProtected: protected != 0}
	buffer, err := newAligned(window)
	if err != nil {
		return nil, j.errorf(deferral.Internal, "cannot be read: %w", err)
	}
	defer buffer.free()
	for _, place := range windows(size) {
		data, err := buffer.read(file, place, size)
		if err != nil {
			return nil, j.errorf(deferral.Internal, "cannot be read at byte %d: %w", place.start, err)
		}
		found.take(data, place, size)
	}
	return found, nil
}

// take notes what one window shows.
func (c *contents) take(data []byte, place extent, size int64) {
	if place.mustBeZero && c.dataAt < 0 {
		if rest := bytes.TrimLeft(data, "\x00"); len(rest) > 0 {
			c.dataAt = place.start + int64(len(data)-len(rest))
		}
	}
	for _, m := range marksOf(size) {
		if m.within(data, place.start) && !slices.Contains(c.marks, m.name) {
			c.marks = append(c.marks, m.name)
		}
	}
	if place.start == 0 {
		c.unfinished = unfinished(data)
	}
}
