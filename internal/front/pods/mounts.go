package pods

import (
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// Some subPaths and containers are kept, for errors and warnings.
const (
	maxSubPaths = 16
	maxSubPath  = 256
)

// noteMounts records how all containers, including init and ephemeral ones, use the pod's volumes.
func (p *pod) noteMounts(spec *corev1.PodSpec) {
	byName := make(map[string]*podVolume, len(p.volumes))
	for i := range p.volumes {
		byName[p.volumes[i].Name] = &p.volumes[i]
	}
	note := func(c *corev1.Container, stays bool) {
		for _, mount := range c.VolumeMounts {
			if v := byName[mount.Name]; v != nil {
				v.noteMount(c.Name, &mount, stays)
			}
		}
		for _, device := range c.VolumeDevices {
			if v := byName[device.Name]; v != nil {
				v.used, v.Block, v.writable = true, true, true
				v.noteUse(c.Name)
			}
		}
	}
	for i := range spec.InitContainers {
		c := &spec.InitContainers[i]
		isSidecar := c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways
		note(c, isSidecar)
	}
	for i := range spec.Containers {
		note(&spec.Containers[i], true)
	}
	for i := range spec.EphemeralContainers {
		note((*corev1.Container)(&spec.EphemeralContainers[i].EphemeralContainerCommon), true)
	}
	for i := range p.volumes {
		p.volumes[i].ReadOnlyMounts = p.volumes[i].used && !p.volumes[i].writable
	}
}

// noteMount records how a container mounts the volume. If it stays, it runs beside the
// others; otherwise it ends before they start.
func (v *podVolume) noteMount(container string, mount *corev1.VolumeMount, stays bool) {
	v.used = true
	v.noteUse(container)
	v.writable = v.writable || !mount.ReadOnly
	for _, sub := range []string{mount.SubPath, mount.SubPathExpr} {
		sub = strings.ToValidUTF8(sub[:min(len(sub), maxSubPath)], "")
		if sub != "" {
			v.SubPaths = noted(v.SubPaths, sub)
		}
	}
	if stays {
		v.Together = noted(v.Together, container)
	}
	if strings.Contains(path.Base(mount.MountPath), " ") {
		v.Spaced = noted(v.Spaced, container)
	}
}

// noteUse records one mount of the volume by a container, at most two per container.
func (v *podVolume) noteUse(container string) {
	times := 0
	for _, name := range v.Mounts {
		if name == container {
			times++
		}
	}
	if times < 2 && len(v.Mounts) < 2*maxSubPaths {
		v.Mounts = append(v.Mounts, strings.Clone(container))
	}
}

func noted(names []string, name string) []string {
	if len(names) >= maxSubPaths || slices.Contains(names, name) {
		return names
	}
	return append(names, strings.Clone(name))
}
