package fsmount

import (
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestSplitOptions(t *testing.T) {
	attrs, rest, err := splitOptions("btrfs", []string{"noatime", "nodev", "_netdev", "discard", "compress=zstd", "ro", "defaults"})
	check.Require(t, err == nil && attrs == unix.MOUNT_ATTR_NOATIME|unix.MOUNT_ATTR_NODEV && slices.Equal(rest, []string{"discard", "compress=zstd", "ro"}),
		"%#x, %v, %v", attrs, rest, err)
	// The last word on one thing counts, and relatime is what is meant without any.
	for want, options := range map[int][]string{
		unix.MOUNT_ATTR_STRICTATIME: {"noatime", "strictatime"},
		0:                           {"noatime", "relatime", "nodev", "dev", "norelatime"},
		unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV: {"user", "exec"},
	} {
		attrs, _, err = splitOptions("ext4", options)
		check.That(t, err == nil && attrs == want, "%v: %#x, %v", options, attrs, err)
	}
	for _, option := range []string{"bind", "remount", "rshared", "loop", "journal_path=/dev/vdb", "errors=panic", "no-such-option"} {
		_, _, err = splitOptions("ext4", []string{option})
		check.That(t, err != nil, "%s was taken", option)
	}
}

func TestOptionsOfOurOwn(t *testing.T) {
	for fsType, c := range map[string]struct{ given, want []string }{
		"ext4":  {nil, []string{"errors=remount-ro"}},
		"ext3":  {[]string{"errors=continue"}, []string{"errors=continue"}},
		"xfs":   {[]string{"discard"}, []string{"discard", "nouuid"}},
		"btrfs": {[]string{"discard"}, []string{"discard"}},
	} {
		_, rest, err := splitOptions(fsType, c.given)
		check.That(t, err == nil && slices.Equal(rest, c.want), "%s with %q is mounted with %q, %v", fsType, c.given, rest, err)
	}
	_, rest, err := splitOptions("xfs", []string{"nouuid"})
	check.That(t, err == nil && slices.Equal(rest, []string{"nouuid"}), "%q, %v", rest, err)
}

func TestRestrictions(t *testing.T) {
	info := abi.Info{FSType: "ext4", Options: []string{"users", "noatime", "dev", "ro", "nosymfollow"}}
	got, err := Restrictions(info)
	check.That(t, err == nil && slices.Equal(got, []string{"nosuid", "noexec", "nosymfollow"}), "%q, %v", got, err)
}
