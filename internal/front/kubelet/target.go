// Package kubelet knows the layout of the directories that kubelet creates for volumes.
package kubelet

import (
	"encoding/json"
	"path"
	"strings"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// GuardNotice is the text in a guard, for a person.
const GuardNotice = "This directory stands in for a volume whose filesystem is mounted inside the\n" +
	"pod's sandbox, by crust-proxy. A program that reads this was started by a runtime\n" +
	"that does not know of the volume: check the pod's runtimeClassName and, for Kata,\n" +
	"that disable_block_device_use is not true. Nothing can be written here.\n"

// Describe adds to a volume what follows from its target path: the UID of its pod and, if it has no driver yet and dir
// is the directory that holds the target, the name of its CSI driver. Rel is the path below kubelet's root directory.
func Describe(v *volume.Volume, rel string, dir int) {
	v.PodUID = PodUID(rel)
	if v.Driver == "" && dir != sys.NoFD {
		v.Driver = driver(dir)
	}
}

// PodUID is the pod in pods/<uid>/volumes/... or, of a raw block volume, in plugins/.../publish/<volume>/<uid>, a path
// below kubelet's root directory, or "".
func PodUID(rel string) string {
	if dir, uid := path.Split(rel); strings.HasPrefix(dir, "plugins/kubernetes.io/csi/volumeDevices/publish/") && sys.IsPodUID(uid) {
		return uid
	}
	parts := strings.SplitN(rel, "/", 4)
	if len(parts) < 3 || parts[0] != "pods" || parts[2] != "volumes" || !sys.IsPodUID(parts[1]) {
		return ""
	}
	return parts[1]
}

// PodOf is the pod in a target path .../pods/<uid>/volumes/..., wherever kubelet's root directory is, or "".
func PodOf(target string) string {
	_, below, _ := strings.Cut(target, "/pods/")
	return PodUID("pods/" + below)
}

// VolumeName is NAME in a target path .../volumes/kubernetes.io~csi/NAME/mount, or "". It is that of
// the persistent volume, or of an inline volume in its pod.
func VolumeName(target string) string {
	if dir, last := path.Split(path.Clean(target)); last == "mount" && path.Base(dir) != "." {
		return path.Base(dir)
	}
	return ""
}

// IsRawBlock reports whether a path is one at which kubelet has raw block volumes staged and published.
func IsRawBlock(path string) bool {
	return strings.Contains(path, "/plugins/kubernetes.io/csi/volumeDevices/")
}

// driver reads the name of the CSI driver from the vol_data.json that kubelet writes beside each target, or returns "".
func driver(dir int) string {
	raw, err := sys.ReadSmall(sys.ProcFD(dir)+"/vol_data.json", 64<<10)
	if err != nil {
		return ""
	}
	var data struct {
		DriverName string `json:"driverName"`
	}
	if json.Unmarshal(raw, &data) != nil || !sys.IsDriverName(data.DriverName) {
		return ""
	}
	return data.DriverName
}
