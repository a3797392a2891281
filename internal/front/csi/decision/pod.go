package decision

import (
	"slices"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Pod is what decides about the volumes of a pod.
type Pod struct {
	UID, Namespace, Name string
	// RuntimeHandler is that of the pod's runtime class; "" is the node's default runtime.
	RuntimeHandler string
	// FSGroup shall own the files of its volumes; "" is none.
	FSGroup       string
	FSGroupPolicy volume.GroupPolicy
	// Asks is the value of the pod's annotation policy.AnnotationKey, unparsed: anybody
	// who may create a pod can write it.
	Asks string
	// Volumes are those of the pod that a CSI driver provides.
	Volumes []PodVolume
	// MoreVolumes is set if it has more of them than are in Volumes.
	MoreVolumes bool
}

// PodVolume is a volume of a pod, and what its containers do with it.
type PodVolume struct {
	// Name is its name in the pod, Claim that of its claim; "" is an inline volume.
	Name, Claim string
	// Driver and VolumeID are CSI's. Both are empty where Unknown is set.
	Driver, VolumeID string
	Mark             *Mark // that of the volume on this node, for Explain
	// Unknown is why the driver of the volume is not known: a claim that is not bound yet,
	// or a cluster that does not answer. It is a classed error.
	Unknown error
	// StorageClass is that of its persistent volume, or "". AccessMode is Kubernetes' name of it.
	StorageClass, FSType, AccessMode string
	// ReadOnly is set if the whole pod only reads it. Of its attributes, Context has policy.ContextKey.
	ReadOnly bool
	Context  map[string]string
	// Block is set for a raw block volume, which has no filesystem.
	Block bool
	// NoGroup is set where the pod's FSGroup is not for this volume: the node's own
	// kernel would not have changed its files either.
	NoGroup bool
	// SubPaths are those of the pod's containers, init containers among them: subPath, or subPathExpr as it is written.
	SubPaths []string
	// Together are the containers that mount it and run side by side: all but the init containers that end before the
	// next one starts. Spaced are those that mount it at a path whose last element has a space.
	Together, Spaced []string
	// Mounts names the container of each mount, init and ephemeral containers among them,
	// so that one that mounts it more than once is in it more than once.
	Mounts []string
	// ReadOnlyMounts is set where every container that mounts it does so
	// read-only. A container that is added later may do otherwise.
	ReadOnlyMounts bool
}

// PodContext is the pod of a publish, and the volume in it.
type PodContext struct {
	Pod *Pod
	// Volume is what is known of the volume in the pod. If it is nil, Missing is why.
	Volume  *PodVolume
	Missing error
	// Annotated is set where the pod's annotation asks for the volume.
	Annotated bool
}

// MayHaveInline reports whether the pod has an inline volume of a name, or volumes that are not known.
func (p *Pod) MayHaveInline(name string) bool {
	return p.MoreVolumes || slices.ContainsFunc(p.Volumes, func(v PodVolume) bool { return v.Claim == "" && v.Name == name })
}

// ForVolume finds a volume in the pod, and reads what the pod's annotation asks for. An
// inline volume is found by its name in the pod.
func (p *Pod) ForVolume(driver, volumeID, inlineName string) (*PodContext, error) {
	out := &PodContext{Pod: p}
	asked, err := p.parseAnnotation()
	if err != nil {
		return out, refusal.WithParty(refusal.PartyPod, err)
	}
	found := p.volumesOf(driver, volumeID, inlineName)
	if len(found) == 0 {
		missing := volumeNotInPod(driver, volumeID)
		if i := slices.IndexFunc(p.Volumes, func(v PodVolume) bool { return v.Unknown != nil }); i >= 0 {
			missing = volumeUnknown(p.Volumes[i].Unknown)
		}
		out.Missing = refusal.WithParty(refusal.PartyPods, missing)
		if !asked.Nothing() {
			return out, out.Missing
		}
		return out, nil
	}
	out.Volume = mergeVolumes(found)
	out.Annotated = slices.ContainsFunc(found, func(v PodVolume) bool { return asked.Asks(v.Name) })
	return out, nil
}

// complete adds to what the request says of a volume what the pod says. The pod is nil where no cluster is asked.
func (c *PodContext) complete(req *VolumeRequest) policy.Input {
	in := req.Input
	if c == nil {
		return in
	}
	in.PodKnown, in.RuntimeHandler, in.Namespace, in.Annotated, in.Missing = true, c.Pod.RuntimeHandler, c.Pod.Namespace, c.Annotated, c.Missing
	if c.Volume == nil {
		return in
	}
	in.StorageClass = c.Volume.StorageClass
	if len(c.Volume.SubPaths) > 0 {
		in.Needs = append(in.Needs, policy.NeedSubPath)
	}
	if group, _ := Group(req, c); group != "" {
		in.Needs = append(in.Needs, policy.NeedFSGroup)
	}
	return in
}

// parseAnnotation reads the annotation. A name in it that matches no volume is an error,
// or its author would believe that the volume is deferred.
func (p *Pod) parseAnnotation() (policy.Asked, error) {
	asked, err := policy.ParseAnnotation(p.Asks)
	if err != nil {
		return asked, err
	}
	for _, name := range asked.Names {
		i := slices.IndexFunc(p.Volumes, func(v PodVolume) bool { return v.Name == name })
		switch {
		case i < 0:
			return asked, annotationNamesNothing(name)
		case p.Volumes[i].Block:
			return asked, annotationNamesBlock(name)
		}
	}
	return asked, nil
}

// volumesOf returns the volume under each of its names in the pod: one claim may have several.
// An inline volume is known by its name, which is in its target.
func (p *Pod) volumesOf(driver, volumeID, inlineName string) (found []PodVolume) {
	for _, v := range p.Volumes {
		if v.Driver == driver && (v.VolumeID == volumeID || inlineName != "" && v.Name == inlineName) {
			found = append(found, v)
		}
	}
	return found
}

// mergeVolumes merges what the containers do with a volume under each of its names.
func mergeVolumes(all []PodVolume) *PodVolume {
	out := &PodVolume{Name: all[0].Name, StorageClass: all[0].StorageClass, ReadOnly: true, ReadOnlyMounts: true}
	for _, v := range all {
		out.SubPaths = append(out.SubPaths, v.SubPaths...)
		out.Together = mergeNames(out.Together, v.Together)
		out.Spaced = mergeNames(out.Spaced, v.Spaced)
		out.Mounts = append(out.Mounts, v.Mounts...)
		out.ReadOnly, out.ReadOnlyMounts = out.ReadOnly && v.ReadOnly, out.ReadOnlyMounts && v.ReadOnlyMounts
	}
	return out
}

func mergeNames(a, b []string) []string {
	return slices.Compact(slices.Sorted(slices.Values(slices.Concat(a, b))))
}
