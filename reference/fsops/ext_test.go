package fsops

import (
	"bytes"
	"slices"
	"testing"
)

func TestGroupsWithACopyOfTheSuperblock(t *testing.T) {
	var have []int64
	for group := range int64(130) {
		if hasSuper(group) {
			have = append(have, group)
		}
	}
	if want := []int64{0, 1, 3, 5, 7, 9, 25, 27, 49, 81, 125}; !slices.Equal(have, want) {
		t.Errorf("%v instead of %v", have, want)
	}
}

func TestBlankDeviceHasNoSuperblock(t *testing.T) {
	if super, err := readExt(bytes.NewReader(make([]byte, 4096))); super != nil || err != nil {
		t.Errorf("%+v, %v", super, err)
	}
	if _, err := readExt(bytes.NewReader(make([]byte, 1500))); err == nil {
		t.Error("half a superblock is taken")
	}
}

func FuzzSuperblock(f *testing.F) {
	seed := make([]byte, 2048)
	seed[extStart+extMagic], seed[extStart+extMagic+1], seed[extStart+extGroupBlocks+1] = 0x53, 0xef, 0x80
	f.Add(seed, int64(1<<30))
	f.Fuzz(func(_ *testing.T, raw []byte, device int64) {
		if super, err := readExt(bytes.NewReader(raw)); err == nil && super != nil && device >= 0 {
			_ = super.fill(device)
		}
	})
}

func TestXFSLeavesASmallRest(t *testing.T) {
	is := xfsGeometry{Block: 4096, GroupBlocks: 1000}
	for blocks, want := range map[int64]uint64{3000: 3000, 3063: 3000, 3064: 3064, 999: 999, 63: 0} {
		if got := is.fill(blocks*4096 + 100); got != want {
			t.Errorf("%d blocks: %d instead of %d", blocks, got, want)
		}
	}
}
