package decision

import (
	"slices"
	"testing"
)

func TestDroppedParameters(t *testing.T) {
	got := IgnoredParameters(map[string]string{
		"blockSize": "4096", "mkfsOptions": "-m0", "numberOfInodes": "", "type": "gp3", "fsType": "xfs", "ext4BigAlloc": "true",
		"fsFormatOptions": "-O quota", "inodeSize": "512",
	})
	if want := []string{"blockSize", "ext4BigAlloc", "fsFormatOptions", "inodeSize", "mkfsOptions"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if got := IgnoredParameters(nil); len(got) != 0 {
		t.Errorf("got %q of nothing", got)
	}
}
