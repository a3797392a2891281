package kata

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"path"

	"github.com/crust-proxy/crust-proxy/internal/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/pkg/volume/mountopt"
)

const (
	// infoName is the only name in a volume's directory that is no sandbox id to Kata.
	infoName = abi.InfoName
	// directVol is a disk to runtime-rs; the Go runtime ignores the field.
	directVol = "directvol"

	maxInfo   = 64 << 10
	maxTarget = 189 // its base64 has 252 bytes, the next one 256: over NAME_MAX
)

// encodeInfo is deterministic, so that a projection is compared by its bytes.
func encodeInfo(v *volume.Volume) ([]byte, error) {
	info := abi.Info{VolumeType: directVol, Device: v.Device.Path, FSType: v.FSType, Options: mountopt.Options(v)}
	if v.Group != "" {
		info.Metadata = map[string]string{"fsGroup": v.Group}
		if v.GroupPolicy != volume.GroupPolicyUnset {
			info.Metadata["fsGroupChangePolicy"] = string(v.GroupPolicy)
		}
	}
	return json.Marshal(info)
}

// parseInfo reads a mountInfo.json that anybody may have written.
func parseInfo(raw []byte) (info abi.Info, err error) {
	if err := json.Unmarshal(raw, &info); err != nil {
		return abi.Info{}, fmt.Errorf("not valid JSON: %w", err)
	}
	switch {
	case info.Device == "" || info.FSType == "" || info.VolumeType == "":
		return abi.Info{}, errors.New("volume-type, device or fstype is missing")
	case !path.IsAbs(info.Device) || !sys.IsText(info.Device) || len(info.Device) > 4095:
		return abi.Info{}, errors.New("the device is not an absolute path")
	case !sys.IsText(info.FSType) || len(info.FSType) > 64:
		return abi.Info{}, errors.New("the fstype is not a name")
	}
	return info, nil
}

// nameOf is the name of a volume's directory. It is made of the target as kubelet
// gave it: containerd and CRI-O hand kubelet's path to a runtime as it is, unless
// its very last element is a link, which a target's is not.
func nameOf(v *volume.Volume) string { return dirName(path.Clean(v.Target)) }

func hasName(v *volume.Volume) bool {
	return v.Target != "" && len(path.Clean(v.Target)) <= maxTarget
}

// dirName is the name for a target: URL-safe base64 with padding.
func dirName(target string) string {
	return base64.URLEncoding.EncodeToString([]byte(target))
}

func targetOf(dirName string) (string, bool) {
	raw, err := base64.URLEncoding.DecodeString(dirName)
	if err != nil {
		return "", false
	}
	target := string(raw)
	return target, path.IsAbs(target) && sys.IsText(target)
}
