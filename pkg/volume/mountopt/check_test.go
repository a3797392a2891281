package mountopt

import (
	"slices"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// documented are the options with a value of the filesystems' documentation as of
// Linux 6.18 (admin-guide/ext4.rst, admin-guide/xfs.rst, btrfs(5)): each that takes
// a path, a device or a number, and those whose value decides what an error does to
// the node. A guest's kernel is its own, so it is spared only what leads elsewhere.
var documented = []struct {
	fsType, option string
	host, guest    bool
}{
	{"ext4", "journal_path=/dev/vdc", false, false},
	{"ext4", "journal_dev=0x810", false, false},
	{"ext4", "journal_dev=2064", false, false},
	{"ext4", "usrjquota=aquota.user", false, true},
	{"ext4", "grpjquota=/etc/passwd", false, true},
	{"ext4", "jqfmt=vfsv1", false, true},
	{"ext4", "sb=131072", false, true},
	{"ext4", "errors=panic", false, false},
	{"ext4", "errors=remount-ro", true, true},
	{"ext4", "errors=continue", true, true},
	{"ext4", "commit=30", true, true},
	{"ext4", "inode_readahead_blks=64", true, true},
	{"ext4", "inode_readahead_blks=1073741824", false, true},
	{"ext4", "stripe=16", true, true},
	{"ext4", "max_batch_time=15000", true, true},
	{"ext4", "min_batch_time=0", true, true},
	{"ext4", "journal_ioprio=3", true, true},
	{"ext4", "journal_ioprio=8", false, true},
	{"ext4", "init_itable=10", true, true},
	{"ext4", "max_dir_size_kb=1024", true, true},
	{"ext4", "resuid=1000", true, true},
	{"ext4", "resgid=1000", true, true},
	{"ext4", "barrier=0", true, true},
	{"ext4", "mb_optimize_scan=1", true, true},
	{"ext4", "data=journal", true, true},
	{"ext4", "data_err=abort", true, true},
	{"ext4", "test_dummy_encryption=v2", false, true},

	{"xfs", "logdev=/dev/vdc", false, false},
	{"xfs", "rtdev=/dev/vdc", false, false},
	{"xfs", "allocsize=64k", true, true},
	{"xfs", "logbufs=8", true, true},
	{"xfs", "logbsize=256k", true, true},
	{"xfs", "sunit=16", true, true},
	{"xfs", "swidth=64", true, true},
	{"xfs", "max_atomic_write=64k", true, true},
	{"xfs", "max_open_zones=4", false, true},

	{"btrfs", "device=/dev/vdc", false, false},
	{"btrfs", "fatal_errors=panic", false, false},
	{"btrfs", "fatal_errors=bug", false, false},
	{"btrfs", "commit=30", true, true},
	{"btrfs", "compress=zstd:3", true, true},
	{"btrfs", "compress-force=zlib:9", true, true},
	{"btrfs", "max_inline=2k", true, true},
	{"btrfs", "metadata_ratio=4", true, true},
	{"btrfs", "rescue=ignorebadroots:nologreplay", true, true},
	{"btrfs", "space_cache=v2", true, true},
	{"btrfs", "subvol=/data/my volume", true, true}, // a path in the filesystem
	{"btrfs", "subvolid=256", true, true},
	{"btrfs", "thread_pool=10000", false, true},
	{"btrfs", "fragment=all", false, true},

	// What a number is, is not left to the kernel.
	{"ext4", "commit=/dev/vdc", false, true},
	{"ext4", "commit=-1", false, true},
	{"ext4", "stripe", false, true},
	{"xfs", "logbufs=0x8", false, true},
	// One option that a kernel would split into two.
	{"ext4", `commit="5,journal_path=/dev/vdc`, false, false},
	{"ext4", `data=ordered,journal_path=/dev/vdc`, false, false},
	{"ext4", `context="a,journal_path=/dev/vdc"`, false, false},
	{"ext4", `context=a,b`, false, false},
	{"ext4", `context="system_u:object_r:container_file_t:s0:c1,c2"`, true, true},
	// One filesystem's options are not another's.
	{"ext4", "nouuid", false, true},
	{"xfs", "errors=remount-ro", false, true},
	{"vfat", "uid=0", false, true},
	{"vfat", "noatime", true, true},
	// mount(8) itself would set up another device.
	{"ext4", "verity.hashdevice=/dev/vdc", false, false},
	{"ext4", "loop=/dev/loop0", false, false},
	{"ext4", "offset=4096", false, false},
	{"ext4", "bind", false, false},
	{"ext4", "rshared", false, false},
	// CSI drivers' own words.
	{"ext4", "read_ahead_kb=4096", false, false},
	{"btrfs", "btrfs-allocation-data-bytes=1", false, false},
	// For debugging.
	{"ext4", "abort", false, true},
	{"ext4", "no-such-option", false, true},
}

func TestNoOptionLeadsToAnotherDevice(t *testing.T) {
	for _, c := range documented {
		name, value, _ := strings.Cut(c.option, "=")
		for where, is := range map[string]struct {
			err  error
			want bool
		}{
			"this node's kernel": {CheckForHost(c.fsType, c.option), c.host},
			"a guest":            {Check(c.fsType, c.option), c.guest},
		} {
			check.That(t, (is.err == nil) == is.want, "%s of %s for %s: %v", c.option, c.fsType, where, is.err)
			if is.err == nil {
				continue
			}
			for _, part := range []string{`"` + name + `"`, c.fsType, "mountOptions"} {
				check.That(t, strings.Contains(is.err.Error(), part), "%s: the error does not say %s: %v", c.option, part, is.err)
			}
			check.That(t, len(value) <= 8 || !strings.Contains(is.err.Error(), value), "%s: the error repeats the value: %v", c.option, is.err)
		}
	}
}

// Each option on the lists is one: a misspelt one would be refused by the kernel.
func TestPlainOptions(t *testing.T) {
	for fsType, options := range map[string]string{
		"ext4": "noatime nodiratime discard nodelalloc noload usrquota prjquota acl lazytime ro",
		"ext3": "noatime errors=remount-ro", "ext2": "noatime",
		"xfs":   "noatime discard nouuid inode64 largeio pquota norecovery swalloc wsync",
		"btrfs": "noatime compress autodefrag discard=async nodatacow ssd space_cache nologreplay",
		"f2fs":  "noatime nosuid nodev noexec sync rw defaults",
	} {
		for option := range strings.FieldsSeq(options) {
			check.Must(t, CheckForHost(fsType, option))
		}
	}
}

func TestStrip(t *testing.T) {
	for given, want := range map[string]string{
		"_netdev noatime nofail":                                     "noatime",
		"auto noauto comment=x x-systemd.automount X-mount.mkdir ro": "ro",
		"nouser nousers noowner nogroup silent loud discard":         "discard",
		"user exec":        "noexec nosuid nodev exec",
		"users":            "noexec nosuid nodev",
		"group suid owner": "nosuid nodev suid nosuid nodev",
		"grpid xattr":      "grpid xattr",
	} {
		check.Equal(t, strings.Join(Strip(strings.Fields(given)), " "), want, "%s", given)
	}
}

func TestSplit(t *testing.T) {
	got := Split([]string{"noatime,ro", " discard , ,commit=5", `context="u:r:t:s0:c1,c2",rw`, `"a,ro`})
	want := []string{"noatime", "ro", "discard", "commit=5", `context="u:r:t:s0:c1,c2"`, "rw", `"a,ro`}
	check.That(t, slices.Equal(got, want), "%q", got)
	again := Split(got)
	check.That(t, slices.Equal(again, want), "split a second time: %q", again)
}
