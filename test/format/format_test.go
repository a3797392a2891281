//go:build system

package format_test

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/disk/mkfs"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

var filesystems = []string{"ext4", "xfs", "btrfs"}

func TestBlankDeviceIsFormattedOnce(t *testing.T) {
	for _, fs := range filesystems {
		t.Run(fs, func(t *testing.T) {
			r := newFormatter(t)
			device, backing := r.blank()
			r.want(true, device, fs, volume.FormatHost, false)
			mounts(t, device, fs)
			unix.Sync()
			before := hash(t, backing)
			for _, policy := range []volume.FormatPolicy{"", "host", "never"} {
				for _, readOnly := range []bool{false, true} {
					r.want(false, device, fs, policy, readOnly)
				}
			}
			wantSame(t, backing, before, "a device that holds the filesystem was written to")
			for _, other := range append(filesystems, "ext3", "vfat") {
				if other != fs {
					r.refused(device, backing, other, volume.FormatHost, false, volume.InUse, "holds "+fs, "wipefs")
					r.refused(device, backing, other, volume.FormatNever, false, volume.InUse, "holds "+fs)
				}
			}
		})
	}
}

// TestRootDirectoryOfANewFilesystem: group and mode are there before any sandbox has
// the volume, and what a rule says of mkfs holds.
func TestRootDirectoryOfANewFilesystem(t *testing.T) {
	for _, c := range []struct {
		fs      string
		root    mkfs.Root
		options []string
		want    string // mode and group
	}{
		{"ext4", mkfs.Root{Group: 2000, Mode: 0o2775}, []string{"-i", "65536", "-E", "stride=16"}, "2775 2000"},
		{"ext4", mkfs.Root{Mode: 0o777}, nil, "777 0"},
		{"ext4", mkfs.Root{}, nil, "755 0"},
		{"xfs", mkfs.Root{Group: 2000, Mode: 0o2775}, []string{"-m", "reflink=0"}, "2775 2000"},
		{"xfs", mkfs.Root{Mode: 0o2777}, nil, "2777 0"},
		{"btrfs", mkfs.Root{Group: 2000, Mode: 0o2775}, []string{"-n", "32768"}, "755 0"}, // mkfs.btrfs cannot
	} {
		t.Run(fmt.Sprintf("%s %o", c.fs, c.root.Mode), func(t *testing.T) {
			r := newFormatter(t)
			device, _ := r.blank()
			fd := openPath(t, device)
			defer func() { _ = unix.Close(fd) }()
			formatted, err := r.f.Prepare(t.Context(), mkfs.Request{Device: fd, Volume: "/v", Path: device, FSType: c.fs, Policy: volume.FormatHost,
				Options: c.options, Root: c.root})
			check.Require(t, err == nil && formatted, "formatted %v: %v", formatted, err)
			got := rootOf(t, device, c.fs)
			check.That(t, got == c.want, "mode and group are %s, want %s", got, c.want)
		})
	}
}

// rootOf gives mode and group of the root directory.
func rootOf(t *testing.T, device, fs string) string {
	t.Helper()
	dir := t.TempDir()
	check.Must(t, unix.Mount(device, dir, fs, 0, ""))
	defer func() { _ = unix.Unmount(dir, 0) }()
	var st unix.Stat_t
	check.Must(t, unix.Stat(dir, &st))
	return fmt.Sprintf("%o %d", st.Mode&0o7777, st.Gid)
}

func TestBlankDeviceThatIsNotToBeFormatted(t *testing.T) {
	r := newFormatter(t)
	device, backing := r.blank()
	r.refused(device, backing, "ext4", volume.FormatNever, false, volume.InUse, "blank", "never")
	r.refused(device, backing, "ext4", volume.FormatHost, true, volume.InUse, "blank", "read-only")
	r.refused(device, backing, "ext3", volume.FormatHost, false, volume.Invalid, "blank", "only ext4, xfs and btrfs")
}

// TestDeviceOfADriverThatDefersByItself: the driver answers for what is on it, and neither
// a blank device nor one that holds something else is what it says.
func TestDeviceOfADriverThatDefersByItself(t *testing.T) {
	r := newFormatter(t)
	device, backing := r.blank()
	for _, readOnly := range []bool{false, true} {
		r.refused(device, backing, "ext4", volume.FormatDriver, readOnly, volume.InUse, "blank", "defers by itself", "ext4")
	}
	for name, spoil := range foreign(t) {
		device, backing := r.blank()
		spoil(backing)
		if !strings.HasPrefix(name, "ext") || strings.HasSuffix(name, "copy") {
			r.refused(device, backing, "ext4", volume.FormatDriver, false, volume.InUse, "not ext4")
		}
		accepted := "f2fs" // which only its own kernel can read
		if name == "ext2" || name == "ext3" {
			accepted = "ext4"
		}
		before := hash(t, backing)
		r.want(false, device, accepted, volume.FormatDriver, false)
		check.That(t, before == hash(t, backing), "%s: the device was written to", name)
	}
	for _, fs := range filesystems {
		device, backing := r.blank()
		rig.Mkfs(t, fs, backing)
		r.want(false, device, fs, volume.FormatDriver, false)
		for _, other := range filesystems {
			if other != fs {
				r.refused(device, backing, other, volume.FormatDriver, false, volume.InUse, "holds "+cmp.Or(map[string]string{"ext4": "ext2, ext3 or ext4"}[fs], fs), "not "+other)
			}
		}
	}
}

func TestDeviceOfAnOddSize(t *testing.T) {
	r := newFormatter(t)
	for _, odd := range []int64{mib, 3*mib + 512, 9*mib + 7*512, 64 * mib} {
		backing := rig.Image(t, odd)
		device := rig.Loop(t, backing, loopdev.Options{})
		r.want(true, device, "ext4", volume.FormatHost, false)
	}
	// Too small for an xfs: mkfs says so.
	backing := rig.Image(t, mib)
	r.refused(rig.Loop(t, backing, loopdev.Options{}), backing, "xfs", volume.FormatHost, false, volume.Internal, "mkfs.xfs failed")
}

// TestLargeSectors: what is read past the page cache, and cleared after a failed mkfs, is whole sectors.
func TestLargeSectors(t *testing.T) {
	device, err := loopdev.Attach(rig.Image(t, size), loopdev.Options{SectorSize: 16 << 10})
	check.Needs(t, err == nil, "a kernel with sectors of 16 KiB")
	t.Cleanup(func() { check.Must(t, loopdev.Detach(device)) })
	const mkfsXFS = `$real -b size=16k -s size=16k "$@"`
	check.Kind(t, check.Err(newFormatter(t, tools(t, "xfs", mkfsXFS+"; exit 1")).prepare(device, "xfs", volume.FormatHost, false)), volume.Internal, "exit code 1")
	r := newFormatter(t, tools(t, "xfs", mkfsXFS))
	r.want(true, device, "xfs", volume.FormatHost, false)
	r.want(false, device, "xfs", volume.FormatDriver, true)
	fd := openPath(t, device)
	defer func() { _ = unix.Close(fd) }()
	check.Must(t, r.f.CheckReplay(t.Context(), mkfs.Request{Device: fd, Volume: "/v", Path: device, FSType: "xfs"}))
	mounts(t, device, "xfs")
}

// foreign are the things that may be on a device, and a word of the error.
func foreign(t *testing.T) map[string]func(backing string) string {
	bytesAt := func(at int64, data, says string) func(string) string {
		return func(backing string) string { write(t, backing, at, []byte(data)); return says }
	}
	by := func(says, input, name string, args ...string) func(string) string {
		return func(backing string) string { run(t, input, name, append(args, backing)...); return says }
	}
	md := "\xfc\x4e\x2b\xa9\x01\x00\x00\x00"
	return map[string]func(string) string{
		"ext2":             by("ext2", "", "mke2fs", "-q", "-t", "ext2"),
		"ext3":             by("ext3", "", "mke2fs", "-q", "-t", "ext3"),
		"swap":             by("swap", "", "mkswap", "-q"),
		"mbr":              by("partition table", "label: dos\n,\n", "sfdisk", "-q"),
		"gpt":              by("partition table", "label: gpt\n,\n", "sfdisk", "-q"),
		"luks":             bytesAt(0, "LUKS\xba\xbe\x00\x01", "LUKS"),
		"luks copy":        bytesAt(0x4000, "SKUL\xba\xbe\x00\x02", "LUKS"),
		"lvm":              bytesAt(512, "LABELONE\x01\x00\x00\x00\x00\x00\x00\x00crc!\x20\x00\x00\x00LVM2 001", "LVM2"),
		"md 1.1":           bytesAt(0, md, "md"),
		"md 1.2":           bytesAt(4096, md, "md"),
		"md 1.0":           bytesAt(-8192, md, "md"),
		"md 0.90":          bytesAt(-65536, md, "md"),
		"gpt's copy":       bytesAt(-512, "EFI PART", "GPT"),
		"btrfs' copy":      bytesAt(64*mib+64, "_BHRfS_M", "btrfs"),
		"half a btrfs":     bytesAt(65536+64, "!BHRfS_M", "cut off"),
		"ext4's copy":      bytesAt(128*mib+56, "\x53\xef\x01\x00\x01\x00", "copy"),
		"iso9660":          bytesAt(32769, "CD001\x01", "data at byte 32769"),
		"one byte":         bytesAt(mib-1, "x", "byte 1048575"),
		"the last byte":    bytesAt(-1, "x", fmt.Sprint("byte ", size-1)),
		"the first byte":   bytesAt(0, "\x01", "byte 0"),
		"a zfs label":      bytesAt(-300*1024, "some pool", "data at byte"),
		"a tar archive":    bytesAt(257, "ustar", "data at byte 257"),
		"a database's own": bytesAt(8192, "ORCLDISK", "data at byte 8"),
	}
}

func TestForeignContentsStayAsTheyAre(t *testing.T) {
	for name, put := range foreign(t) {
		t.Run(name, func(t *testing.T) {
			r := newFormatter(t)
			backing := rig.Image(t, size)
			says := put(backing)
			device := rig.Loop(t, backing, loopdev.Options{})
			for _, fs := range filesystems {
				for _, policy := range []volume.FormatPolicy{"", "host", "never"} {
					r.refused(device, backing, fs, policy, false, volume.InUse, says, "wipe")
				}
				r.refused(device, backing, fs, volume.FormatHost, true, volume.InUse, says)
			}
		})
	}
}

func TestTwoFilesystemsInOnePlace(t *testing.T) {
	r := newFormatter(t)
	backing := rig.Image(t, size)
	rig.Mkfs(t, "ext4", backing)
	write(t, backing, 65536+64, []byte("_BHRfS_M"))
	device := rig.Loop(t, backing, loopdev.Options{})
	r.refused(device, backing, "xfs", volume.FormatHost, false, volume.InUse, "more than one")
	r.refused(device, backing, "ext4", volume.FormatNever, true, volume.InUse, "more than one")
}

// TestWhateverTheBytesWere is the property: no contents are ever written over.
func TestWhateverTheBytesWere(t *testing.T) {
	const seed = 20
	random := rand.New(rand.NewPCG(seed, seed))
	r := newFormatter(t)
	marks := []string{"LUKS\xba\xbe", "XFSB", "_BHRfS_M", "\x53\xef", "EFI PART", "\x55\xaa", "LABELONE", "SWAPSPACE2", "\xfc\x4e\x2b\xa9"}
	for i := range 40 {
		backing := rig.Image(t, size)
		for range 1 + random.IntN(3) {
			at := random.Int64N(mib - 600)
			if random.IntN(3) == 0 {
				at = size - mib + random.Int64N(mib-600)
			}
			data := make([]byte, 1+random.IntN(500))
			for k := range data {
				data[k] = byte(random.Uint32())
			}
			data[0] |= 1
			if random.IntN(2) == 0 {
				data = []byte(marks[random.IntN(len(marks))])
			}
			write(t, backing, at, data)
		}
		device := check.Value(loopdev.Attach(backing, loopdev.Options{}))(t)
		r.refused(device, backing, filesystems[i%3], volume.FormatHost, i%5 == 0, volume.InUse)
		check.Must(t, loopdev.Detach(device))
	}
}

func TestLeftoversAreAcceptedOnlyWhereAllowed(t *testing.T) {
	r := newFormatter(t, func(c *mkfs.Config) { c.AcceptLeftovers = true })
	for _, put := range foreign(t) {
		backing := rig.Image(t, size)
		says := put(backing)
		device := rig.Loop(t, backing, loopdev.Options{})
		if !strings.Contains(says, "byte") {
			r.refused(device, backing, "xfs", volume.FormatHost, false, volume.InUse, says)
			continue
		}
		r.want(true, device, "xfs", volume.FormatHost, false)
	}
}

func TestDeviceInUse(t *testing.T) {
	r := newFormatter(t)
	device, backing := r.blank()
	held := check.Value(unix.Open(device, unix.O_RDONLY|unix.O_EXCL|unix.O_CLOEXEC, 0))(t)
	r.refused(device, backing, "ext4", volume.FormatHost, false, volume.InUse, "held by another", "findmnt")
	r.refused(device, backing, "ext4", volume.FormatHost, true, volume.InUse, "blank")
	_ = unix.Close(held)
	r.want(true, device, "ext4", volume.FormatHost, false)
	dir := t.TempDir()
	check.Must(t, unix.Mount(device, dir, "ext4", unix.MS_RDONLY, ""))
	defer func() { _ = unix.Unmount(dir, 0) }()
	unix.Sync()
	r.refused(device, backing, "ext4", volume.FormatHost, false, volume.InUse, "mounted")
	r.refused(device, backing, "xfs", volume.FormatHost, false, volume.InUse, "mounted")
	r.want(false, device, "ext4", volume.FormatHost, true)
}

func TestWriteProtectedDevice(t *testing.T) {
	r := newFormatter(t)
	backing := rig.Image(t, size)
	device := rig.Loop(t, backing, loopdev.Options{ReadOnly: true})
	r.refused(device, backing, "ext4", volume.FormatHost, false, volume.InUse, "write-protected")
	r.refused(device, backing, "ext4", volume.FormatNever, false, volume.InUse, "never")
}

func TestDeviceThatIsGone(t *testing.T) {
	r := newFormatter(t)
	backing := rig.Image(t, size)
	device := check.Value(loopdev.Attach(backing, loopdev.Options{}))(t)
	fd := openPath(t, device)
	defer func() { _ = unix.Close(fd) }()
	check.Must(t, loopdev.Detach(device))
	_, err := r.f.Prepare(t.Context(), mkfs.Request{Device: fd, Volume: "/v", Path: device, FSType: "ext4", Policy: volume.FormatHost})
	check.That(t, volume.KindOf(err) == volume.NotFound && err != nil, "kind %v: %v", volume.KindOf(err), err)
}

// TestNameDoesNotMatter moves the node away and puts another device there.
func TestNameDoesNotMatter(t *testing.T) {
	r := newFormatter(t)
	meant, _ := r.blank()
	other, otherBacking := r.blank()
	dir := rig.Tmpfs(t, "mode=0700")
	node := filepath.Join(dir, "node")
	makeNode := func(device string) {
		var st unix.Stat_t
		check.Must(t, unix.Stat(device, &st))
		// Where it is not root's own either, mkfs can open it.
		const nobody = 65534
		check.Must(t, errors.Join(unix.Mknod(node, unix.S_IFBLK|0o600, int(st.Rdev)), os.Chown(node, nobody, nobody)))
	}
	for i, fs := range filesystems {
		if i > 0 {
			meant, _ = r.blank()
		}
		makeNode(meant)
		fd := openPath(t, node)
		check.Must(t, os.Rename(node, node+".moved-for-"+fs))
		makeNode(other)
		before := hash(t, otherBacking)
		formatted, err := r.f.Prepare(t.Context(), mkfs.Request{Device: fd, Volume: "/v", Path: node, FSType: fs, Policy: volume.FormatHost})
		_ = unix.Close(fd)
		check.That(t, err == nil && formatted, "%s: formatted %v: %v", fs, formatted, err)
		wantSame(t, otherBacking, before, fs+": the device that took over the name was written to")
		mounts(t, meant, fs)
		check.Must(t, os.Remove(node))
	}
}
