package fsops

import (
	"testing"
	"unsafe"
)

// The size of its argument is part of a request's number.
func TestArgumentsHaveTheSizesOfTheirRequests(t *testing.T) {
	for name, arg := range map[string]struct {
		request uint
		size    uintptr
	}{
		"resize":    {btrfsIocResize, unsafe.Sizeof(btrfsVolArgs{})},
		"dev info":  {btrfsIocDevInfo, unsafe.Sizeof(btrfsDevInfo{})},
		"fs info":   {btrfsIocFSInfo, unsafe.Sizeof(btrfsFSInfo{})},
		"geometry":  {xfsIocGeometry, unsafe.Sizeof(xfsGeometry{})},
		"growfs":    {xfsIocGrowData, unsafe.Sizeof(xfsGrowData{})},
		"dev stats": {btrfsIocGetDevStats, unsafe.Sizeof(btrfsDevStats{})},
	} {
		if want := uintptr(arg.request >> 16 & 0x3fff); arg.size != want {
			t.Errorf("%s: %d bytes instead of %d", name, arg.size, want)
		}
	}
}
