package abi

import (
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/pkg/volume/mountopt"
)

// Info is mountInfo.json. Its keys are those of Kata's file of that name.
type Info struct {
	VolumeType string            `json:"volume-type"`
	Device     string            `json:"device"`
	FSType     string            `json:"fstype"`
	Metadata   map[string]string `json:"metadata,omitempty"`
	Options    []string          `json:"options,omitempty"`
}

// The keys of an Info's metadata. The last three are ours: without them a handler can still
// serve the volume, with fewer checks.
const (
	MetaGroup  = "fsGroup"
	MetaPolicy = "fsGroupChangePolicy"
	metaTarget = "crust.targetPath"
	metaPod    = "crust.podUID"
	metaDevice = "crust.device"
)

// TypeBlock is the type of a volume that is a block device, the only one so far. A
// handler refuses what it does not know.
const TypeBlock = "block"

// MaxInfo bounds the file.
const MaxInfo = 64 << 10

// Encode returns the file of a volume. It is deterministic, so that projections can be compared by their bytes.
func Encode(v *volume.Volume) ([]byte, error) {
	info := Info{
		VolumeType: TypeBlock, Device: v.Device.Path, FSType: v.FSType, Options: mountopt.Options(v),
		Metadata: map[string]string{metaTarget: v.ResolvedTarget},
	}
	if v.PodUID != "" {
		info.Metadata[metaPod] = v.PodUID
	}
	if v.Device.Kind == volume.BlockDevice {
		info.Metadata[metaDevice] = fmt.Sprintf("%d:%d", v.Device.Major, v.Device.Minor)
	}
	if v.Group != "" {
		info.Metadata[MetaGroup] = v.Group
		if v.GroupPolicy != volume.GroupPolicyUnset {
			info.Metadata[MetaPolicy] = string(v.GroupPolicy)
		}
	}
	return sys.EncodeJSON(info, MaxInfo)
}

// Parse parses and checks an untrusted file. It ignores unknown keys.
func Parse(raw []byte) (Info, error) {
	var info Info
	if err := json.Unmarshal(raw, &info); err != nil {
		return Info{}, fmt.Errorf("not valid JSON: %w", err)
	}
	return info, info.check()
}

func (i Info) check() error {
	switch {
	case i.Device == "" || i.FSType == "" || i.VolumeType == "":
		return errors.New("volume-type, device or fstype is missing")
	case !isPath(i.Device):
		return errors.New("the device is not an absolute path")
	case !sys.IsText(i.FSType) || len(i.FSType) > 64 || strings.Contains(i.FSType, "/"):
		return errors.New("the fstype is not a name")
	case slices.ContainsFunc(i.Options, func(o string) bool { return o == "" || !sys.IsText(o) }):
		return errors.New("an option is not text")
	case i.Target() != "" && !isPath(i.Target()):
		return fmt.Errorf("%s is not an absolute path", metaTarget)
	}
	if _, _, err := i.Group(); err != nil {
		return err
	}
	_, _, _, err := i.DeviceNumber()
	return err
}

// Target returns the resolved target path, or "" if the file does not say it.
func (i Info) Target() string { return i.Metadata[metaTarget] }

// PodUID returns the UID of the pod that the volume belongs to, or "" if the file does not say it.
func (i Info) PodUID() string { return i.Metadata[metaPod] }

// ReadOnly reports whether the volume is read-only as a whole.
func (i Info) ReadOnly() bool { return slices.Contains(i.Options, "ro") }

// DeviceNumber returns the number that the device must have. known is false if the file does not say it.
func (i Info) DeviceNumber() (major, minor uint32, known bool, err error) {
	text := i.Metadata[metaDevice]
	if text == "" {
		return 0, 0, false, nil
	}
	first, second, _ := strings.Cut(text, ":")
	a, errA := strconv.ParseUint(first, 10, 32)
	b, errB := strconv.ParseUint(second, 10, 32)
	if errA != nil || errB != nil {
		return 0, 0, false, fmt.Errorf("%s is not major:minor", metaDevice)
	}
	return uint32(a), uint32(b), true, nil
}

// Group returns the group that the files shall have, if any.
func (i Info) Group() (gid uint32, wanted bool, err error) {
	text, policy := i.Metadata[MetaGroup], i.GroupPolicy()
	if text == "" {
		if policy != volume.GroupPolicyUnset {
			return 0, false, fmt.Errorf("%s without %s", MetaPolicy, MetaGroup)
		}
		return 0, false, nil
	}
	n, err := strconv.ParseUint(text, 10, 32)
	// Some readers would take 010 for 8, and chown takes the highest number for "no change".
	if err != nil || strconv.FormatUint(n, 10) != text || uint32(n) == ^uint32(0) {
		return 0, false, fmt.Errorf("%s is not a decimal group id", MetaGroup)
	}
	switch policy {
	case volume.GroupPolicyUnset, volume.GroupAlways, volume.GroupOnMismatch:
		return uint32(n), true, nil
	default:
		return 0, false, fmt.Errorf("%s is neither %s nor %s", MetaPolicy, volume.GroupAlways, volume.GroupOnMismatch)
	}
}

// GroupPolicy returns when the group is changed; unset means always.
func (i Info) GroupPolicy() volume.GroupPolicy { return volume.GroupPolicy(i.Metadata[MetaPolicy]) }

func isPath(s string) bool { return path.IsAbs(s) && sys.IsText(s) && len(s) < 4096 }
