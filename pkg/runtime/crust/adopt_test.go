package crust

import (
	"os"
	"testing"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestForeignDevicesAreAdoptedWhateverTheVolumeIs: the device has an owner, also where
// we know nothing of the volume's type.
func TestForeignDevicesAreAdoptedWhateverTheVolumeIs(t *testing.T) {
	b := newBench(t, bySocket)
	v := b.Volume("foreign")
	check.Must(t, os.Mkdir(b.path(v, ""), 0o700))
	check.Must(t, os.WriteFile(b.path(v, abi.InfoName), []byte(`{"volume-type":"network","device":"/dev/vdq","metadata":{"crust.device":"x"}}`), 0o600))
	b.h.AdoptForeign()
	if got := b.h.Adopted(); len(got) != 1 || got[0].Device.Path != "/dev/vdq" {
		t.Errorf("adopted %v", got)
	}
}
