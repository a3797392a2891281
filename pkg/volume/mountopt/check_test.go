package mountopt

import (
	"slices"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// documented are the options with a value of the filesystems' documentation as of Linux 6.18 (admin-guide/ext4.rst,
// admin-guide/xfs.rst, btrfs(5)): each that takes a path, a device or a number, and those whose value decides what an
// error does to the node. A guest's kernel is its own, so it is spared only what leads elsewhere.
var documented = []struct {
	fsType      string
	host, guest bool
	options     []string
}{
	{"ext4", false, false, []string{"journal_path=/dev/vdc", "journal_dev=0x810", "journal_dev=2064", "errors=panic"}},
	{"ext4", false, true, []string{
		"usrjquota=aquota.user", "grpjquota=/etc/passwd", "jqfmt=vfsv1", "sb=131072", "inode_readahead_blks=1073741824",
		"journal_ioprio=8", "test_dummy_encryption=v2",
	}},
	{"ext4", true, true, []string{
		"errors=remount-ro", "errors=continue", "commit=30", "inode_readahead_blks=64", "stripe=16", "max_batch_time=15000",
		"min_batch_time=0", "journal_ioprio=3", "init_itable=10", "max_dir_size_kb=1024", "resuid=1000", "resgid=1000",
		"barrier=0", "mb_optimize_scan=1", "data=journal", "data_err=abort",
	}},
	{"xfs", false, false, []string{"logdev=/dev/vdc", "rtdev=/dev/vdc"}},
	{"xfs", true, true, []string{"allocsize=64k", "logbufs=8", "logbsize=256k", "sunit=16", "swidth=64", "max_atomic_write=64k"}},
	{"xfs", false, true, []string{"max_open_zones=4"}},
	{"btrfs", false, false, []string{"device=/dev/vdc", "fatal_errors=panic", "fatal_errors=bug"}},
	{"btrfs", true, true, []string{
		"commit=30", "compress=zstd:3", "compress-force=zlib:9", "max_inline=2k", "metadata_ratio=4",
		"rescue=ignorebadroots:nologreplay", "space_cache=v2", "subvol=/data/my volume" /* a path in the filesystem */, "subvolid=256",
	}},
	{"btrfs", false, true, []string{"thread_pool=10000", "fragment=all"}},

	// What a number is, is not left to the kernel.
	{"ext4", false, true, []string{"commit=/dev/vdc", "commit=-1", "stripe"}},
	{"xfs", false, true, []string{"logbufs=0x8"}},
	// One option that a kernel would split into two.
	{"ext4", false, false, []string{
		`commit="5,journal_path=/dev/vdc`, `data=ordered,journal_path=/dev/vdc`, `context="a,journal_path=/dev/vdc"`, `context=a,b`,
	}},
	{"ext4", true, true, []string{`context="system_u:object_r:container_file_t:s0:c1,c2"`}},
	// One filesystem's options are not another's.
	{"ext4", false, true, []string{"nouuid"}},
	{"xfs", false, true, []string{"errors=remount-ro"}},
	{"vfat", false, true, []string{"uid=0"}},
	{"vfat", true, true, []string{"noatime"}},
	// mount(8) itself would set up another device.
	{"ext4", false, false, []string{"verity.hashdevice=/dev/vdc", "loop=/dev/loop0", "offset=4096", "bind", "rshared"}},
	// CSI drivers' own words.
	{"ext4", false, false, []string{"read_ahead_kb=4096"}},
	{"btrfs", false, false, []string{"btrfs-allocation-data-bytes=1"}},
	// For debugging.
	{"ext4", false, true, []string{"abort", "no-such-option"}},
}

func TestNoOptionLeadsToAnotherDevice(t *testing.T) {
	for _, c := range documented {
		for _, option := range c.options {
			wantAccepted(t, c.fsType, option, "this node's kernel", CheckForHost(c.fsType, option), c.host)
			wantAccepted(t, c.fsType, option, "a guest", Check(c.fsType, option), c.guest)
		}
	}
}

func wantAccepted(t *testing.T, fsType, option, where string, err error, want bool) {
	t.Helper()
	check.That(t, (err == nil) == want, "%s of %s for %s: %v", option, fsType, where, err)
	if err != nil {
		name, value, _ := strings.Cut(option, "=")
		check.Says(t, "the error of "+option, err.Error(), `"`+name+`"`, fsType, "mountOptions")
		check.That(t, len(value) <= 8 || !strings.Contains(err.Error(), value), "%s: the error repeats the value: %v", option, err)
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
