package decision

import (
	"maps"
	"slices"
	"strings"
)

// IsRuntimeRS reports whether the name of a runtime handler says that its pods run under Kata's runtime-rs.
func IsRuntimeRS(handler string) bool { return strings.Contains(handler, "runtime-rs") }

// mayBeRuntimeRS reports whether the pods of a runtime handler can run under runtime-rs. A
// name is certain only where kata-deploy chose it.
func mayBeRuntimeRS(handler string) bool {
	ofGo := func(prefix string) bool { return strings.HasPrefix(handler, prefix) }
	return IsRuntimeRS(handler) || !slices.ContainsFunc([]string{"kata-qemu", "kata-clh", "kata-fc", "kata-stratovirt"}, ofGo)
}

// Hazard is what a runtime will do wrong with a volume, and for which containers.
type Hazard struct {
	Text       string
	Containers []string
}

// Hazards lists what runtime-rs will do wrong with the volume of a pod. The handler is ours, such as kata.
func Hazards(handler string, pod *PodContext) (found []Hazard) {
	if handler != "kata" || pod == nil || pod.Volume == nil || !mayBeRuntimeRS(pod.Pod.RuntimeHandler) {
		return nil
	}
	if many := pod.Volume.Together; len(many) > 1 {
		found = append(found, Hazard{attachedTwice, many})
	}
	if repeated := repeatedNames(pod.Volume.Mounts); len(repeated) > 0 {
		found = append(found, Hazard{mountedTwice, repeated})
	}
	if spaced := pod.Volume.Spaced; len(spaced) > 0 {
		found = append(found, Hazard{neverUnmounted, spaced})
	}
	return found
}

// repeatedNames returns the names that are in the list more than once, without repeats.
func repeatedNames(names []string) (repeated []string) {
	names = slices.Sorted(slices.Values(names))
	for i, name := range names[:max(0, len(names)-1)] {
		if names[i+1] == name && !slices.Contains(repeated, name) {
			repeated = append(repeated, name)
		}
	}
	return repeated
}

const (
	attachedTwice = "several containers mount one volume: under Kata's runtime-rs the volume is attached a second time when one of them " +
		"restarts, which then never starts again or damages the filesystem; mount it in one container, or use Kata's Go runtime"
	mountedTwice = "a container mounts one volume at several paths: Kata's runtime-rs attaches the volume once per path, and afterwards no container of " +
		"the pod can start or restart; mount it at one path, or use Kata's Go runtime"
	neverUnmounted = "the last element of a mount path has a space: Kata's runtime-rs never unmounts such a volume, and its journal must be " +
		"replayed at the next mount; choose another mount path, or use Kata's Go runtime"
)

// mkfsParameters are the parameters of StorageClasses by which known drivers choose how
// they make a filesystem. A driver that is asked for a block device does not use them.
var mkfsParameters = []string{
	"blocksize", "inodesize", "bytesperinode", "numberofinodes", "ext4bigalloc", "ext4clustersize", "ext4encryptionsupport", // AWS EBS
	"mkfsoptions",     // Ceph RBD
	"mkfsparams",      // Longhorn
	"fsformatoptions", // Hetzner; Proxmox has blockSize and inodeSize
	"formatoptions",   // Synology
}

// IgnoredParameters lists the parameters of a volume that have no effect once it is deferred.
func IgnoredParameters(context map[string]string) []string {
	known := func(key string) bool { return slices.Contains(mkfsParameters, strings.ToLower(key)) }
	return slices.DeleteFunc(slices.Sorted(maps.Keys(context)), func(key string) bool { return !known(key) || context[key] == "" })
}
