package claim

import (
	"os"
	"testing"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// TestADeviceThatCannotBeOpenedMayBeMounted: a name that leads nowhere proves nothing of a
// device that the kernel still has.
func TestADeviceThatCannotBeOpenedMayBeMounted(t *testing.T) {
	there, err := os.ReadDir("/sys/dev/block")
	if err != nil || len(there) == 0 {
		t.Fatalf("a machine without a block device: %v", err)
	}
	known, ok := parseNumber(there[0].Name(), ":")
	if !ok {
		t.Fatal(there[0].Name())
	}
	gone := volume.Device{Kind: volume.BlockDevice, Major: 4095, Minor: 1}
	for device, busy := range map[volume.Device]bool{known: true, gone: false} {
		device.Path = t.TempDir() + "/gone"
		table := NewTable(nil, nil, nil)
		r := Request{Volume: &volume.Volume{Key: "k", Target: "/t", Device: device}, Mountable: true}
		if err := table.WaitUnmounted(t.Context(), r); (err != nil) != busy || busy && volume.KindOf(err) != volume.Busy {
			t.Errorf("%v is unmounted: %v", device, err)
		}
	}
}
