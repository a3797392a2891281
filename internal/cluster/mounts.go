package cluster

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// mounts is what a pod's containers do with one of its volumes.
type mounts struct {
	used, block bool
	writable    bool // somewhere
	subPaths    []string
}

// Of subPaths a few are kept, to name them in an error.
const (
	maxSubPaths = 16
	maxSubPath  = 256
)

// mountsOf goes through all containers, those for initialization and for debugging
// among them.
func mountsOf(spec *corev1.PodSpec) map[string]mounts {
	all := make(map[string]mounts)
	take := func(volumes []corev1.VolumeMount, devices []corev1.VolumeDevice) {
		for _, mount := range volumes {
			all[mount.Name] = all[mount.Name].with(mount)
		}
		for _, device := range devices {
			m := all[device.Name]
			m.used, m.block, m.writable = true, true, true
			all[device.Name] = m
		}
	}
	for i := range spec.InitContainers {
		take(spec.InitContainers[i].VolumeMounts, spec.InitContainers[i].VolumeDevices)
	}
	for i := range spec.Containers {
		take(spec.Containers[i].VolumeMounts, spec.Containers[i].VolumeDevices)
	}
	for i := range spec.EphemeralContainers {
		take(spec.EphemeralContainers[i].VolumeMounts, spec.EphemeralContainers[i].VolumeDevices)
	}
	return all
}

func (m mounts) with(mount corev1.VolumeMount) mounts {
	m.used = true
	m.writable = m.writable || !mount.ReadOnly
	for _, path := range []string{mount.SubPath, mount.SubPathExpr} {
		path = strings.ToValidUTF8(path[:min(len(path), maxSubPath)], "")
		if path != "" && len(m.subPaths) < maxSubPaths && !slices.Contains(m.subPaths, path) {
			m.subPaths = append(m.subPaths, strings.Clone(path))
		}
	}
	return m
}
