package pods

import (
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// mounts is what a pod's containers do with one of its volumes.
type mounts struct {
	used, block bool
	writable    bool // somewhere
	subPaths    []string
	// together are the containers that run side by side and mount it, spaced those
	// that mount it at a path whose last element has a space.
	together, spaced []string
}

// Of subPaths and containers a few are kept, to name them in errors and warnings.
const (
	maxSubPaths = 16
	maxSubPath  = 256
)

// mountsOf goes through all containers, those for initialization and for debugging
// among them.
func mountsOf(spec *corev1.PodSpec) map[string]mounts {
	all := make(map[string]mounts)
	take := func(c *corev1.Container, stays bool) {
		for _, mount := range c.VolumeMounts {
			all[mount.Name] = all[mount.Name].with(mount).in(c.Name, stays, mount.MountPath)
		}
		for _, device := range c.VolumeDevices {
			m := all[device.Name]
			m.used, m.block, m.writable = true, true, true
			all[device.Name] = m
		}
	}
	for i := range spec.InitContainers {
		c := &spec.InitContainers[i]
		isSidecar := c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways
		take(c, isSidecar)
	}
	for i := range spec.Containers {
		take(&spec.Containers[i], true)
	}
	for i := range spec.EphemeralContainers {
		take((*corev1.Container)(&spec.EphemeralContainers[i].EphemeralContainerCommon), true)
	}
	return all
}

func (m mounts) with(mount corev1.VolumeMount) mounts {
	m.used = true
	m.writable = m.writable || !mount.ReadOnly
	for _, sub := range []string{mount.SubPath, mount.SubPathExpr} {
		sub = strings.ToValidUTF8(sub[:min(len(sub), maxSubPath)], "")
		if sub != "" {
			m.subPaths = noted(m.subPaths, sub)
		}
	}
	return m
}

// in notes a container that mounts the volume at a path, and whether it stays beside the
// others.
func (m mounts) in(container string, stays bool, at string) mounts {
	if stays {
		m.together = noted(m.together, container)
	}
	if strings.Contains(path.Base(at), " ") {
		m.spaced = noted(m.spaced, container)
	}
	return m
}

func noted(names []string, name string) []string {
	if len(names) >= maxSubPaths || slices.Contains(names, name) {
		return names
	}
	return append(names, strings.Clone(name))
}
