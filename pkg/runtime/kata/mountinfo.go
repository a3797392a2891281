package kata

import (
	"encoding/base64"
	"path"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/pkg/volume/mountopt"
)

const (
	// infoName is the only file in a volume's directory that Kata takes for no sandbox id.
	infoName = abi.InfoName
	// directVol is a disk to runtime-rs; the Go runtime ignores the field.
	directVol = "directvol"

	maxTarget = 189 // its base64 has 252 bytes, the next one 256: over NAME_MAX
)

// Encode returns a volume's mountInfo.json. It is deterministic, so that projections can be
// compared by their bytes.
func (layout) Encode(v *volume.Volume) ([]byte, error) {
	info := abi.Info{VolumeType: directVol, Device: v.Device.Path, FSType: v.FSType, Options: mountopt.Options(v)}
	if v.Group != "" {
		info.Metadata = map[string]string{abi.MetaGroup: v.Group}
		if v.GroupPolicy != volume.GroupPolicyUnset {
			info.Metadata[abi.MetaPolicy] = string(v.GroupPolicy)
		}
	}
	return sys.EncodeJSON(info, abi.MaxInfo)
}

// nameOf returns the name of a volume's directory. It encodes the target as kubelet named it:
// containerd and CRI-O pass kubelet's path to a runtime as it is, unless its last element is
// a link, which a target's is not.
func nameOf(v *volume.Volume) string { return dirName(path.Clean(v.Target)) }

func hasName(v *volume.Volume) bool {
	return v.Target != "" && len(path.Clean(v.Target)) <= maxTarget
}

// dirName returns the name for a target: URL-safe base64 with padding.
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
