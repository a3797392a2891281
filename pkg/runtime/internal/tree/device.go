package tree

import (
	"bytes"
	"encoding/json"
	"path"

	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// DeviceIn reads which device a volume's file names, whatever else is in it: the device
// has an owner, also where we cannot serve the volume.
func DeviceIn(raw []byte) volume.Device {
	var info struct {
		Device string `json:"device"`
	}
	if err := json.NewDecoder(bytes.NewReader(raw)).Decode(&info); err != nil || !path.IsAbs(info.Device) {
		return volume.Device{}
	}
	return claim.Identify(path.Clean(info.Device))
}
