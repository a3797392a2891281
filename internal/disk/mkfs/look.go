package mkfs

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/disk/superblock"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/pkg/volume/mountopt"
)

type contents struct {
	probe      probe
	marks      []string // signatures that we know of ourselves
	dataAt     int64    // the first byte in the first or last MiB that is not zero; -1 means none
	unfinished bool     // its mkfs says that it did not end
	// lacksMode: it is an ext4 of ours whose making was interrupted before its root directory got its mode.
	lacksMode      bool
	writeProtected bool
}

// is reports whether the device holds this filesystem and nothing else.
func (c *contents) is(fsType string) bool {
	return !c.probe.ambivalent && c.probe.tags["TYPE"] == fsType && c.probe.tags["PTTYPE"] == ""
}

// labelled reports whether an ext4 has the label for this. Anybody who can write to the
// filesystem can set the label, so it proves nothing.
func (c *contents) labelled() bool { return c.is("ext4") && c.probe.tags["LABEL"] == labelNoMode }

// blank reports whether the device holds nothing. leftovers ignores bytes that are part of no signature.
func (c *contents) blank(leftovers bool) bool {
	return c.probe.nothing() && len(c.marks) == 0 && (leftovers || c.dataAt < 0)
}

// signatures describes what was found; "" is none.
func (c *contents) signatures() string {
	said := c.probe.describe()
	for _, mark := range c.marks {
		if !slices.Contains(said, mark) {
			said = append(said, mark)
		}
	}
	return strings.Join(said, ", ")
}

// examine reads the device while nobody else can have it. With onlyIfBlank blkid is asked
// only about a device that seems blank.
func (d *device) examine(ctx context.Context, onlyIfBlank bool) (*contents, error) {
	file, err := d.openAlone(ctx, unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer sys.CloseFileAlone(file)
	found, err := d.read(file)
	if err != nil {
		return nil, err
	}
	if onlyIfBlank && !found.blank(d.f.cfg.AcceptLeftovers) {
		return found, nil // what it is does not matter
	}
	found.probe, err = d.blkid(ctx)
	if err != nil {
		return nil, err
	}
	begun, uuid, err := d.intent.begun()
	if err != nil {
		return nil, d.errorf(volume.Internal, "%w", err)
	}
	found.lacksMode = begun == workMaking && found.is("ext4") && found.probe.tags["UUID"] == uuid
	return found, nil
}

// buffers are used again: a MiB for each examination would have the collector run every few.
var buffers = sync.Pool{New: func() any { return new(superblock.Aligned(window)) }}

// read searches the device itself: blkid's "nothing found" can also mean "could not be read",
// and it reads through the page cache.
func (d *device) read(file *os.File) (*contents, error) {
	size, err := file.Seek(0, io.SeekEnd)
	if err != nil {
		return nil, d.errorf(volume.Internal, "its size cannot be told: %w", err)
	}
	if size == 0 {
		return nil, d.errorf(volume.NotFound, "has no size: has the driver attached it?")
	}
	protected, err := unix.IoctlGetInt(int(file.Fd()), unix.BLKROGET)
	if err != nil {
		return nil, d.errorf(volume.Internal, "cannot be asked whether it is write-protected: %w", err)
	}
	d.size = size
	found := &contents{dataAt: -1, writeProtected: protected != 0}
	buffer := buffers.Get().(*[]byte) //nolint:errcheck,forcetypeassert // buffers has nothing else
	defer buffers.Put(buffer)
	for _, place := range windows(size, grainOf(file)) {
		data, err := place.read(file, *buffer, size)
		if err != nil {
			return nil, d.errorf(volume.Internal, "cannot be read at byte %d: %w", place.start, err)
		}
		found.scan(data, place, size)
	}
	return found, nil
}

func (c *contents) scan(data []byte, place extent, size int64) {
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
	const inProgress = 126 // the flag of an xfs whose mkfs has not ended
	if place.start == 0 && len(data) > inProgress && bytes.HasPrefix(data, xfsMark.bytes) {
		c.unfinished = data[inProgress] != 0
	}
}

// refuseReplay refuses a filesystem whose journal has to be replayed.
func (d *device) refuseReplay(fsType string) error {
	file, err := d.open(unix.O_RDONLY | unix.O_DIRECT)
	if err != nil {
		return err
	}
	defer closeFile(file)
	dirty, err := superblock.NeedsReplay(file, fsType)
	switch {
	case errors.Is(err, superblock.ErrNone):
		return nil // a filesystem without a journal, or one that only its own kernel knows
	case err != nil:
		return d.errorf(volume.Internal, "cannot be read: %w", err)
	case dirty:
		return d.errorf(unmet, "holds a %s that was not unmounted cleanly, and the volume is read-only, so its journal "+
			"cannot be replayed: mount it once in a pod that has the volume read-write, or mount it without a replay, with "+
			"mountOptions: [%s] in the StorageClass or the PersistentVolume: a frozen snapshot is complete then, anything else "+
			"may lack its last writes", fsType, mountopt.NoReplay(fsType))
	}
	return nil
}

const blkidFound, blkidNothing, blkidAmbivalent = 0, 2, 8 // how blkid ends

// probe is blkid's answer.
type probe struct {
	tags       map[string]string
	ambivalent bool
}

func (p probe) nothing() bool { return len(p.tags) == 0 && !p.ambivalent }

func (p probe) describe() (out []string) {
	if p.ambivalent {
		out = append(out, "the signatures of more than one thing")
	}
	if t := p.tags["TYPE"]; t != "" {
		out = append(out, t)
	}
	if t := p.tags["PTTYPE"]; t != "" {
		out = append(out, "a partition table ("+t+")")
	}
	if len(out) == 0 && len(p.tags) > 0 {
		out = append(out, "something that blkid knows but does not name")
	}
	return out
}

// blkid searches for every signature that it knows, without its cache.
func (d *device) blkid(ctx context.Context) (probe, error) {
	program, err := d.f.tool("blkid")
	if err != nil {
		return probe{}, d.errorf(volume.KindOf(err), "cannot be looked at: %w", err)
	}
	ran, err := program.run(ctx, d.box(), []*os.File{d.file}, "-p", "-o", "export", childDevice)
	if err != nil {
		if ctx.Err() != nil {
			return probe{}, d.canceledError(ctx.Err())
		}
		return probe{}, d.errorf(volume.Internal, "blkid could not be run: %w", err)
	}
	found, ok := parseProbe(ran)
	if !ok {
		return probe{}, d.errorf(volume.Internal, "blkid cannot tell what is on it (%s): %s", ran.how(), ran.text())
	}
	return found, nil
}

// parseProbe accepts an answer only if its parts agree: "nothing" with an error text, or with a finding, is no answer.
func parseProbe(r *result) (probe, bool) {
	if r.Signal != 0 || r.Stderr != "" && r.Code != blkidAmbivalent {
		return probe{}, false
	}
	tags, isPart := make(map[string]string), false
	for line := range strings.SplitSeq(r.Stdout, "\n") {
		if line == "" {
			continue
		}
		key, value, ok := strings.Cut(line, "=")
		if !ok || !nameForm().MatchString(key) {
			return probe{}, false
		}
		// DEVNAME repeats the argument. What the disk's table says of a partition is not on it.
		if strings.HasPrefix(key, "PART_ENTRY_") {
			isPart = true
		} else if key != "DEVNAME" {
			tags[key] = value
		}
	}
	switch r.Code {
	case blkidFound:
		return probe{tags: tags}, isPart || len(tags) > 0
	case blkidNothing:
		return probe{}, !isPart && len(tags) == 0
	case blkidAmbivalent:
		return probe{tags: tags, ambivalent: true}, true
	default:
		return probe{}, false
	}
}

// nameForm is the form of a filesystem type, and of a key of blkid's answer.
var nameForm = sys.LazyRegexp(`^[A-Za-z0-9_.-]{1,64}$`)

const (
	kib = int64(1) << 10
	mib = int64(1) << 20
	gib = int64(1) << 30
	// window is what is read at the start and at the end.
	window = mib
	// least is the least that is read.
	least = 4 * kib
)

// grainOf is how reads and writes of a device are aligned, past the page cache.
func grainOf(file *os.File) int64 {
	sector, _ := unix.IoctlGetInt(int(file.Fd()), unix.BLKSSZGET)
	return max(least, int64(sector))
}

// mark is a signature that we look for besides blkid.
type mark struct {
	name  string
	at    int64
	bytes []byte
}

func (m mark) within(data []byte, start int64) bool {
	from := m.at - start
	return from >= 0 && from < int64(len(data)) && bytes.HasPrefix(data[from:], m.bytes)
}

// The marks of the filesystems that can be made.
var (
	extMark   = mark{"ext2, ext3 or ext4", kib + 56, []byte{0x53, 0xef}}
	xfsMark   = mark{"xfs", 0, []byte("XFSB")}
	btrfsMark = mark{"btrfs", 64*kib + 64, []byte("_BHRfS_M")}
)

// marksOf are the signatures of what is most often found on a volume, and the copies from which a
// filesystem can be restored whose first blocks were overwritten.
func marksOf(size int64) []mark {
	md, gpt := []byte{0xfc, 0x4e, 0x2b, 0xa9}, []byte("EFI PART")
	btrfs := btrfsMark.bytes
	marks := []mark{
		extMark, xfsMark, btrfsMark,
		{"a btrfs whose mkfs was cut off", 64*kib + 64, []byte("!BHRfS_M")},
		{"a copy of a btrfs superblock", 64*mib + 64, btrfs},
		{"a copy of a btrfs superblock", 256*gib + 64, btrfs},
		{"crypto_LUKS", 0, []byte("LUKS\xba\xbe")},
		{"a partition table (GPT)", 512, gpt},
		{"a partition table (GPT)", 4 * kib, gpt},
		{"a partition table (GPT)", size - 512, gpt},
		{"a partition table (GPT)", size - 4*kib, gpt},
		{"a boot sector or partition table (MBR)", 510, []byte{0x55, 0xaa}},
		{"a RAID member (md)", 0, md},
		{"a RAID member (md)", 4 * kib, md},
		{"a RAID member (md)", (size - 8*kib) &^ (4*kib - 1), md},
		{"a RAID member (md)", size&^(64*kib-1) - 64*kib, md},
	}
	for sector := range int64(4) {
		marks = append(marks, mark{"LVM2_member", sector * 512, []byte("LABELONE")})
	}
	for _, page := range []int64{4 * kib, 8 * kib, 16 * kib, 64 * kib} {
		marks = append(marks, mark{"swap", page - 10, []byte("SWAPSPACE2")}, mark{"swap", page - 10, []byte("SWAP-SPACE")})
	}
	for at := 16 * kib; at <= 4*mib; at *= 2 {
		marks = append(marks, mark{"a copy of a LUKS header", at, []byte("SKUL\xba\xbe")})
	}
	// The first copies of an ext superblock lie in block group 1, for the three common block sizes. The magic number
	// has only two bytes, so the two possible states and three ways to treat errors that follow it must match too.
	const extCopy = "a copy of an ext2, ext3 or ext4 superblock"
	for _, start := range []int64{8193 * kib, 16384 * 2 * kib, 32768 * 4 * kib} {
		for _, state := range []byte{0, 1} {
			for onError := byte(1); onError <= 3; onError++ {
				marks = append(marks, mark{extCopy, start + 56, []byte{0x53, 0xef, state, 0, onError, 0}})
			}
		}
	}
	return marks
}

// extent is a part of the device that is read.
type extent struct {
	start, length int64
	mustBeZero    bool
}

// windows are the parts to read: both ends, and around each mark beyond them.
func windows(size, grain int64) []extent {
	tail := max(window, (size-window)&^(grain-1))
	out := []extent{{0, min(size, window), true}}
	for _, m := range marksOf(size) {
		e := extent{m.at &^ (grain - 1), grain, false}
		if m.at >= window && m.at+int64(len(m.bytes)) <= tail && !slices.Contains(out, e) {
			out = append(out, e)
		}
	}
	for start := tail; start < size; start += window {
		out = append(out, extent{start, min(window, size-start), true})
	}
	return out
}

// read reads the extent into an aligned buffer that is large enough. Less than the whole of it is an error.
func (e extent) read(file *os.File, buffer []byte, size int64) ([]byte, error) {
	want := min(e.length, size-e.start)
	// The end of a device need not be a multiple of it; its end ends the read.
	ask := min((want+least-1)&^(least-1), int64(len(buffer)))
	n, err := file.ReadAt(buffer[:ask], e.start)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	if int64(n) < want {
		return nil, io.ErrUnexpectedEOF
	}
	return buffer[:want], nil
}
