package kata

import (
	"os"
	"testing"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
	kataemu "github.com/crust-proxy/crust-proxy/test/rig/kata"
)

// TestForeignDevicesAreAdoptedWhateverTheVolumeIs: the device has an owner, also where
// we know nothing of the volume's type.
func TestForeignDevicesAreAdoptedWhateverTheVolumeIs(t *testing.T) {
	for raw, adopted := range map[string]bool{
		`{"volume-type":"","device":"/dev/vdq","fstype":"ext4"}`:                  true,
		`{"volume-type":"spdkvol","device":"/dev/vdq","fstype":""}`:               true,
		`{"device":"/dev/vdq"}`:                                                   true,
		`{"volume-type":7,"device":"/dev/vdq","options":"ro","metadata":[]}`:      true,
		`{"volume-type":"directvol","device":"/dev/./vdq","fstype":"a\u0000b"} x`: true,
		`{"volume-type":"directvol","device":"vdq","fstype":"ext4"}`:              false,
		`{"volume-type":"directvol","fstype":"ext4"}`:                             false,
	} {
		b := newBench(t, kataemu.Go)
		v := b.Volume("a")
		check.Must(t, os.Mkdir(b.dir(v), 0o700))
		check.Must(t, os.WriteFile(b.dir(v)+"/"+infoName, []byte(raw), 0o600))
		b.h.AdoptForeign()
		var got []*volume.Volume
		for _, one := range b.h.Adopted() {
			if one.Device.Path == "/dev/vdq" {
				got = append(got, one)
			}
		}
		if (len(got) == 1) != adopted {
			t.Errorf("%s: adopted %v", raw, got)
		}
	}
}
