package kata

import (
	"encoding/base64"
	"errors"
	"path"
	"path/filepath"
	"regexp"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/projection"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/pkg/volume/mountopt"
)

// maxIDs bounds the sandbox ids taken from one volume's directory.
const maxIDs = 64

var podOfTarget = regexp.MustCompile(`/pods/([A-Za-z0-9][A-Za-z0-9-]{0,63})/volumes/`)

// layout is Kata's tree of volumes: a directory for each, named by its target path, with
// mountInfo.json and a file for each sandbox.
type layout struct{ root string }

// DirOf returns the name of a volume's directory: its target in URL-safe base64 with padding. That is the target
// as kubelet named it: containerd and CRI-O pass kubelet's path to a runtime as it is, unless its last element
// is a link, which a target's is not.
func (layout) DirOf(v *volume.Volume) (dir string, ok bool) {
	target := path.Clean(v.Target)
	return base64.URLEncoding.EncodeToString([]byte(target)), v.Target != "" && len(target) <= maxTarget
}

// KeyOf returns the key of the target that a directory is named for.
func (l layout) KeyOf(dir string) (volume.Key, bool) {
	target, ok := targetOf(dir)
	return volume.KeyOf(target), ok
}

// Read reads a volume back. If mountInfo.json cannot be read, only the paths are set; if it
// is wrong in other parts, the device is set as well.
func (l layout) Read(dir string) *volume.Volume {
	target, _ := targetOf(dir)
	v := &volume.Volume{Key: volume.KeyOf(target), Target: target, ResolvedTarget: target, Handler: Name}
	if parts := podOfTarget.FindStringSubmatch(target); parts != nil {
		v.PodUID = parts[1]
	}
	file := filepath.Join(l.root, dir, infoName)
	raw, err := sys.ReadSmall(file, abi.MaxInfo)
	if err != nil {
		return v
	}
	v.Device = projection.DeviceIn(raw)
	if info, err := abi.Parse(raw); err == nil {
		projection.Describe(v, info, file)
	}
	return v
}

// Sandboxes lists the sandbox-id files of a volume, the newest first. The Go runtime
// writes one when it creates a container; nobody removes it.
func (l layout) Sandboxes(dir string) ([]string, error) {
	ids, err := sys.NewestFiles(unix.AT_FDCWD, filepath.Join(l.root, dir), maxIDs, abi.IsSandboxID)
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	return ids, err
}

const (
	// infoName is the only file in a volume's directory that Kata takes for no sandbox id.
	infoName = abi.InfoName
	// directVol is a disk to runtime-rs; the Go runtime ignores the field.
	directVol = "directvol"
	noUUID    = "nouuid"

	maxTarget = 189 // its base64 has 252 bytes, the next one 256: over NAME_MAX
)

// Encode returns a volume's mountInfo.json. It is deterministic, so that projections can be compared by their bytes.
// A clone has the UUID of its original, beside which the guest's kernel mounts an xfs only with nouuid.
func (layout) Encode(v *volume.Volume) ([]byte, error) {
	info := abi.Info{VolumeType: directVol, Device: v.Device.Path, FSType: v.FSType, Options: mountopt.Options(v)}
	if v.FSType == "xfs" && !slices.Contains(info.Options, noUUID) {
		info.Options = append(info.Options, noUUID)
	}
	if v.Group != "" && !v.ReadOnly { // to change a group on a read-only mount fails, and with it the container
		info.Metadata = map[string]string{abi.MetaGroup: v.Group}
		if v.GroupPolicy != volume.GroupPolicyUnset {
			info.Metadata[abi.MetaPolicy] = string(v.GroupPolicy)
		}
	}
	return sys.EncodeJSON(info, abi.MaxInfo)
}

func targetOf(dirName string) (string, bool) {
	raw, err := base64.URLEncoding.DecodeString(dirName)
	if err != nil {
		return "", false
	}
	target := string(raw)
	return target, path.IsAbs(target) && sys.IsText(target)
}
