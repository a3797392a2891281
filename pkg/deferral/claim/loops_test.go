package claim

import (
	"os"
	"testing"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// TestALoopDeviceThatCannotBeReadMayHaveAnyImage: it may be the second way to the data of a
// volume, unless the kernel says that it has no image.
func TestALoopDeviceThatCannotBeReadMayHaveAnyImage(t *testing.T) {
	sysfs := t.TempDir() + "/"
	for _, dir := range []string{"7:1", "7:2/loop"} {
		if err := os.MkdirAll(sysfs+dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for minor, unknown := range map[uint32]bool{0: false, 1: false, 2: true} {
		for _, path := range []string{sysfs + "missing", os.DevNull} {
			d := volume.Device{Kind: volume.BlockDevice, Major: loopMajor, Minor: minor, Path: path}
			if info, err := loopInfo(sysfs, d); info != nil || (err != nil) != unknown {
				t.Errorf("loop%d as %s: %v, %v", minor, path, info, err)
			}
		}
	}
}
