package mkfs

import (
	"slices"
	"strings"
	"testing"
)

func TestMkfsOptions(t *testing.T) {
	for _, good := range [][]string{
		{"ext4"},
		{"ext4", "-i", "16384", "-I", "512", "-O", "bigalloc,^metadata_csum", "-C", "65536", "-E", "stride=16,stripe_width=64", "-m", "1"},
		{"xfs", "-i", "size=1024", "-m", "reflink=0", "-d", "agcount=4", "-l", "size=64m"},
		{"btrfs", "-n", "32768", "-m", "dup"},
	} {
		if err := CheckOptions(good[0], good[1:]); err != nil {
			t.Errorf("%q: %v", good, err)
		}
	}
	for _, bad := range [][]string{
		{"ext4", "-i"},
		{"ext4", "-F", "-F"},
		{"ext4", "-U", "clear"},
		{"ext4", "-S", "1"},
		{"ext4", "-d", "/etc"},
		{"ext4", "-i", "16384", "/dev/sda"},
		{"ext4", "-J", "device=UUID=1"},
		{"ext4", "-E", "offset=1048576"},
		{"ext4", "-E", "stride=16,root_owner=1:1"},
		{"ext4", "-O", "-F"},
		{"ext4", "-O", "extent,journal_dev"},
		{"ext4", "-i", ""},
		{"xfs", "-f", "1"},
		{"xfs", "-p", "proto"},
		{"xfs", "-r", "rtdev=sda"},
		{"xfs", "-l", "logdev=sda"},
		{"xfs", "-d", "name=sda"},
		{"xfs", "-d", "file=1"},
		{"xfs", "-d", "size=1g"},
		{"xfs", "-m", "uuid=0"},
		{"btrfs", "-f", "1"},
		{"btrfs", "-r", "dir"},
		{"btrfs", "-O", "a b"},
		{"vfat", "-n", "x"},
	} {
		if err := CheckOptions(bad[0], bad[1:]); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}

func TestArgumentsOfMkfs(t *testing.T) {
	root := Root{Group: 2000, Mode: 0o2775}
	args, _ := ext4Args("u", []string{"-E", "stride=16", "-i", "16384"}, root)
	if got := strings.Join(args, " "); got != "-q -m0 -U u -L crust-unfinished -i 16384 -E lazy_itable_init=1,lazy_journal_init=1,root_owner=0:2000,stride=16" {
		t.Errorf("ext4: %s", got)
	}
	args, prototype := xfsArgs("u", nil, root)
	if !slices.Contains(args, "-p") || prototype != "/\n0 0\nd-g775 0 2000\n$\n" {
		t.Errorf("xfs: %q, %q", args, prototype)
	}
	if args, prototype := xfsArgs("u", nil, Root{}); slices.Contains(args, "-p") || prototype != "" {
		t.Errorf("xfs without a root: %q, %q", args, prototype)
	}
}
