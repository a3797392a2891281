package superblock

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// image makes a filesystem in a file.
func image(t *testing.T, size int64, mkfs string, args ...string) string {
	t.Helper()
	check.Needs(t, check.Err(exec.LookPath(mkfs)) == nil, mkfs)
	path := filepath.Join(t.TempDir(), "image")
	check.Must(t, os.WriteFile(path, nil, 0o600))
	check.Must(t, os.Truncate(path, size))
	check.Run(t, exec.Command(mkfs, append(args, path)...))
	return path
}

func read(t *testing.T, path, fsType string) *Super {
	t.Helper()
	file := check.Value(os.Open(path))(t)
	defer func() { _ = file.Close() }()
	return check.Value(Read(file, fsType))(t)
}

func TestExtOnRecord(t *testing.T) {
	path := image(t, 64<<20, "mkfs.ext4", "-q")
	super := read(t, path, "ext4")
	check.That(t, super.Bytes == 64<<20 && super.Inodes == 16384 && super.Errors == nil && super.Clean && !super.Replay, "a new one: %+v", super)
	// What the kernel's own statfs gave for such an image in a guest.
	check.That(t, super.Is(57381888, 16384) && !super.Is(57381888, 16383) && !super.Is(12638248960, 3085510), "it is not told from others by its size")
	set := func(args ...string) {
		t.Helper()
		for _, arg := range args {
			check.Run(t, exec.Command("debugfs", "-w", "-R", "set_super_value "+arg, path))
		}
	}
	set("error_count 3", "first_error_time 20260102030405", "first_error_func ext4_lookup", "last_error_time 20260203040506",
		"last_error_func ext4_find_entry", "feature_incompat 0x2c6", "state 3")
	super = read(t, path, "ext4")
	e := super.Errors
	check.Require(t, e != nil && e.Count == 3 && e.First.Function == "ext4_lookup" && e.Last.Function == "ext4_find_entry" && super.Replay,
		"with errors: %+v, %+v", super, e)
	want := "the filesystem has errors on record since 2026-01-02T03:04:05Z (3, the last one of ext4_find_entry at " +
		"2026-02-03T04:05:06Z): run e2fsck while no pod has the volume"
	check.Equal(t, e.Words(), want, "the words")
}

// Only the state tells of an error that nothing else is recorded of.
func TestExtState(t *testing.T) {
	raw := extImage(nil)
	binary.LittleEndian.PutUint16(raw[extStart+extState:], extErrorState)
	super, err := Read(bytesAt(raw), "ext4")
	check.That(t, err == nil && super.Errors != nil && !super.Clean && super.Errors.Words() == "the filesystem has errors on record: run e2fsck while no pod has the volume",
		"%+v, %v", super, err)
}

func TestXFSAndBtrfsTellTheirSize(t *testing.T) {
	super := read(t, image(t, 320<<20, "mkfs.xfs", "-q"), "xfs")
	check.That(t, super.Bytes == 320<<20-64<<20 && super.Exact && !super.Replay, "xfs: %+v", super) // the kernel's statfs in a guest: 268435456
	check.That(t, super.Is(268435456, 163840) && !super.Is(240078848, 163840), "xfs is not told from others by its size")
	super = read(t, image(t, 256<<20, "mkfs.btrfs", "-q"), "btrfs")
	check.That(t, super.Bytes == 256<<20 && !super.Exact && !super.Replay && super.Is(256<<20, 0), "btrfs: %+v", super)
}

// TestFills: an xfs counts with its log, a small growth is seen, and what is left out of a device is no growth.
func TestFills(t *testing.T) {
	for _, c := range []struct {
		fsType     string
		size, more int64 // MiB, of what it fills, and of what it does not
		mkfs       []string
	}{
		{"xfs", 320, 340, []string{"mkfs.xfs", "-q"}}, {"xfs", 321, 322, []string{"mkfs.xfs", "-q", "-d", "agsize=96m"}},
		{"xfs", 330, 350, []string{"mkfs.xfs", "-q", "-d", "agsize=80m"}}, {"btrfs", 256, 257, []string{"mkfs.btrfs", "-q"}},
		{"ext4", 100, 110, []string{"mkfs.ext4", "-q", "-b", "1024"}}, {"ext4", 100, 110, []string{"mkfs.ext4", "-q"}},
		{"ext4", 129, 136, []string{"mkfs.ext4", "-q", "-i", "4096", "-b", "4096"}}, // a group of 1 MiB is too small
	} {
		super := read(t, image(t, c.size<<20, c.mkfs[0], c.mkfs[1:]...), c.fsType)
		check.That(t, super.Fills(c.size<<20) && !super.Fills(c.more<<20) && !super.Fills(super.Bytes-1), "%v: %+v", c, super)
	}
}

type bytesAt []byte

func (b bytesAt) ReadAt(p []byte, at int64) (int, error) {
	if at < 0 || at >= int64(len(b)) {
		return 0, io.EOF
	}
	n := copy(p, b[at:])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func extImage(change func(super []byte)) []byte {
	raw := make([]byte, 4096)
	super := raw[extStart:]
	binary.LittleEndian.PutUint16(super[extMagic:], 0xef53)
	binary.LittleEndian.PutUint32(super[extBlocks:], 1000)
	binary.LittleEndian.PutUint32(super[extInodes:], 100)
	if change != nil {
		change(super)
	}
	return raw
}

// What a guest writes there is believed only as far as it can be true, and shown only where it can harm no terminal.
func TestHostileSuperblocks(t *testing.T) {
	le := binary.LittleEndian
	for name, change := range map[string]func([]byte){
		"huge blocks":  func(s []byte) { le.PutUint32(s[extLogBlock:], 63) },
		"no blocks":    func(s []byte) { le.PutUint32(s[extBlocks:], 0) },
		"overflow":     func(s []byte) { le.PutUint32(s[extIncompat:], ext64Bit); le.PutUint32(s[extBlocksTop:], ^uint32(0)) },
		"no magic":     func(s []byte) { s[extMagic] = 0 },
		"bad checksum": func(s []byte) { le.PutUint32(s[extROCompat:], extMetadataCsum) },
	} {
		super, err := Read(bytesAt(extImage(change)), "ext4")
		check.That(t, errors.Is(err, ErrNone) && errors.Is(err, ErrDamaged) == (name != "no magic"), "%s: %+v, %v", name, super, err)
	}
	raw := extImage(func(s []byte) {
		le.PutUint32(s[extErrorCount:], ^uint32(0))
		copy(s[extFirstFunc:], "\x1b[31mred")
		copy(s[extLastFunc:], strings.Repeat("f", extFuncLength))
		le.PutUint32(s[extLastError:], ^uint32(0))
		s[extLastTop] = 0xff
	})
	super, err := Read(bytesAt(raw), "ext4")
	check.Require(t, err == nil && super.Errors.First.Function == "" && len(super.Errors.Last.Function) == extFuncLength, "%+v, %v", super, err)
	text := super.Errors.Words()
	check.That(t, len(text) <= 256 && !strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r > '~' }), "%q", text)
	for _, fsType := range []string{"ext4", "xfs", "btrfs", "vfat"} {
		for _, n := range []int{0, 100, 1024, 2047, 70000} {
			_, err = Read(bytesAt(make([]byte, n)), fsType)
			check.That(t, errors.Is(err, ErrNone) && !errors.Is(err, ErrDamaged), "%s of %d zeros: %v", fsType, n, err)
		}
	}
}

// The checksum that mkfs writes is right, and a torn superblock is none.
func TestTornSuperblock(t *testing.T) {
	path := image(t, 16<<20, "mkfs.ext4", "-q", "-O", "metadata_csum")
	raw := check.Value(os.ReadFile(path))(t)
	check.Value(Read(bytesAt(raw), "ext4"))(t) // whole
	raw[extStart+0x200] ^= 1
	check.Is(t, check.Err(Read(bytesAt(raw), "ext4")), ErrDamaged) // torn
}

func TestPastThePageCache(t *testing.T) {
	path := image(t, 16<<20, "mkfs.ext4", "-q")
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECT, 0)
	check.Needs(t, !errors.Is(err, unix.EINVAL), "a temporary directory with direct I/O") // tmpfs of older kernels has none
	check.Must(t, err)
	file := os.NewFile(uintptr(fd), path)
	defer func() { _ = file.Close() }()
	super, err := Read(file, "ext4")
	check.That(t, err == nil && super.Bytes == 16<<20, "%+v, %v", super, err)
}

func FuzzRead(f *testing.F) {
	f.Add(extImage(nil), "ext4")
	f.Fuzz(func(t *testing.T, raw []byte, fsType string) {
		super, err := Read(bytesAt(raw), fsType)
		check.Require(t, (super == nil) != (err == nil), "%+v, %v", super, err)
		if super == nil {
			return
		}
		check.That(t, super.Bytes > 0 && super.Inodes >= 0, "%+v", super)
		_, _ = NeedsReplay(bytesAt(raw), fsType)
		text := fmt.Sprint(super.Errors.Words(), super.Is(1, 1))
		check.That(t, len(text) <= 512 && !strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r > '~' }), "%q", text)
	})
}

// A new xfs has a clean log. Without the mark of an unmount at the log's head it is one of a guest that was killed.
func TestXFSLog(t *testing.T) {
	for headers, stripe := range map[int64]string{1: "4k", 2: "64k"} { // a header covers 32 KiB
		name := "log stripes of " + stripe
		path := image(t, 320<<20, "mkfs.xfs", "-q", "-l", "su="+stripe)
		file := check.Value(os.OpenFile(path, os.O_RDWR, 0))(t)
		check.Equal(t, check.Value(NeedsReplay(file, "xfs"))(t), false, "%s, new", name)
		g := check.Value(readXFSGeometry(file))(t)
		// mkfs writes one record, that of an unmount, at the start of the log.
		check.Value(file.WriteAt([]byte{0}, (g.logAt+headers)*xlogBlock+xlogOpFlags))(t)
		check.Equal(t, check.Value(NeedsReplay(file, "xfs"))(t), true, "%s, not unmounted", name)
		check.Must(t, file.Truncate((g.logAt+1)*xlogBlock))
		check.Is(t, check.Err(NeedsReplay(file, "xfs")), ErrDamaged) // its end is gone
		check.Must(t, file.Close())
	}
}

func TestReplayOfExtAndBtrfs(t *testing.T) {
	raw := extImage(func(s []byte) { binary.LittleEndian.PutUint32(s[extIncompat:], extRecover) })
	check.Equal(t, check.Value(NeedsReplay(bytesAt(raw), "ext4"))(t), true, "ext4")
	path := image(t, 256<<20, "mkfs.btrfs", "-q")
	file := check.Value(os.OpenFile(path, os.O_RDWR, 0))(t)
	defer func() { _ = file.Close() }()
	check.Equal(t, check.Value(NeedsReplay(file, "btrfs"))(t), false, "btrfs, new")
	check.Value(file.WriteAt([]byte{1}, btrfsStart+btrfsLogRoot+1))(t)
	check.Equal(t, check.Value(NeedsReplay(file, "btrfs"))(t), true, "btrfs")
}
