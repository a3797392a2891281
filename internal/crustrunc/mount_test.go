package crustrunc

import (
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

func TestSplitOptions(t *testing.T) {
	attrs, rest, err := splitOptions([]string{"noatime", "nodev", "discard", "data=ordered", "ro", "defaults"})
	if err != nil || attrs != unix.MOUNT_ATTR_NOATIME|unix.MOUNT_ATTR_NODEV || !slices.Equal(rest, []string{"discard", "data=ordered", "ro"}) {
		t.Fatalf("%#x, %v, %v", attrs, rest, err)
	}
	// The last word on one thing counts, and relatime is what is meant without any.
	for want, options := range map[int][]string{
		unix.MOUNT_ATTR_STRICTATIME: {"noatime", "strictatime"},
		0:                           {"noatime", "relatime", "nodev", "dev"},
	} {
		if attrs, _, err := splitOptions(options); err != nil || attrs != want {
			t.Errorf("%v: %#x, %v", options, attrs, err)
		}
	}
	for _, option := range []string{"bind", "remount", "rshared", "loop"} {
		if _, _, err := splitOptions([]string{option}); err == nil {
			t.Errorf("%s was taken", option)
		}
	}
}
