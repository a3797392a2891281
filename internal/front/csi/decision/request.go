package decision

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/front/kubelet"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/pkg/volume/mountopt"
)

// The keys in the volume context by which kubelet tells a driver of the pod, where the driver wants that.
const (
	PodUIDKey       = "csi.storage.k8s.io/pod.uid"
	PodNamespaceKey = "csi.storage.k8s.io/pod.namespace"
	PodNameKey      = "csi.storage.k8s.io/pod.name"
)

// VolumeRequest is the part of a stage or publish request that decides.
type VolumeRequest struct {
	// Input is what the policy decides by, without the pod.
	policy.Input
	VolumeID string
	// Path is the staging or target path. Errors name the volume by it.
	Path       string
	Capability *csi.VolumeCapability
	// ReadOnly: nobody may write to the volume.
	ReadOnly bool
	// Mark is set if a sandbox has had the volume read-write, or if that is not known.
	Mark *Mark
	// PodUID, PodNamespace and PodName are those of the pod, and PVC its claim of the volume: each
	// is "" if it is not known.
	PodUID, PodNamespace, PodName, PVC string
	// PodProblem is set if the request names another pod than its target path.
	PodProblem error
	// InlineName is the name of an inline volume in its pod, or "".
	InlineName string
	// group is the group that the request asks for, and groupPolicy when it is to be applied.
	group       string
	groupPolicy volume.GroupPolicy
}

// Mark says that a sandbox has had a volume read-write on this node, at any time: the node's kernel
// must not parse what a guest may have written.
type Mark struct {
	Driver   string `json:"driver"`
	VolumeID string `json:"volumeID"`
	// Rule deferred the volume, and the runtime handler Handler got it.
	Rule    string    `json:"rule"`
	Handler string    `json:"handler"`
	Since   time.Time `json:"since"`
	// Path is the file that says so. If Err is set, it is not known whether a sandbox had the volume.
	Path string `json:"-"`
	Err  error  `json:"-"`
}

// StageRequest reads a stage request.
func StageRequest(driver, defaultFSType string, req *csi.NodeStageVolumeRequest) *VolumeRequest {
	r := newRequest(driver, defaultFSType, req)
	r.Path = req.GetStagingTargetPath()
	r.ReadOnly = slices.Contains(readerOnly, r.Capability.GetAccessMode().GetMode())
	return r
}

// PublishRequest reads a publish request, and refuses one whose fields of deferral contradict each
// other, as KEP-2857 does. Rel is the target path below kubelet's root directory, or "". Its pod
// counts too, because kubelet does not name the pod to every driver.
func PublishRequest(driver, defaultFSType, rel string, req *csi.NodePublishVolumeRequest) (*VolumeRequest, error) {
	r := newRequest(driver, defaultFSType, req)
	group, change, err := csidefer.Group(r.Capability)
	r.group, r.groupPolicy = cmp.Or(group, r.group), volume.GroupPolicy(change)
	r.Path, r.Requested = req.GetTargetPath(), csidefer.Requested(req)
	// The form of the id decides, with no staging path: kubelet stages no inline volume. csi.storage.k8s.io/ephemeral
	// is kubelet's for drivers that want pod information, and of a pod's author or a persistent volume for others.
	r.Inline = req.GetStagingTargetPath() == "" && IsInlineID(req.GetVolumeId())
	r.ReadOnly = req.GetReadonly() || slices.Contains(readerOnly, r.Capability.GetAccessMode().GetMode())
	named, ofTarget := r.Context[PodUIDKey], kubelet.PodUID(rel)
	namespace, name := r.Context[PodNamespaceKey], r.Context[PodNameKey]
	r.PodUID = cmp.Or(named, ofTarget)
	switch {
	case named == "" || ofTarget == "": // the names may be attributes, which a pod's author wrote
	case named != ofTarget:
		r.PodUID, r.PodProblem = "", podsDiffer(named, ofTarget)
	case max(len(namespace), len(name)) <= maxObjectName:
		r.PodNamespace, r.PodName = refusal.OneLine(namespace), refusal.OneLine(name)
	}
	if r.Inline {
		r.InlineName = kubelet.VolumeName(rel)
	}
	switch {
	case err != nil:
		return nil, Unreadable(err)
	case r.Requested && r.Capability.GetBlock() != nil:
		return nil, requestedForBlock(r.Path)
	case !r.Requested && (group != "" || change != ""):
		return nil, groupWithoutRequest(r.Path)
	}
	return r, nil
}

func newRequest(driver, defaultFSType string, req interface {
	GetVolumeId() string
	GetVolumeContext() map[string]string
	GetVolumeCapability() *csi.VolumeCapability
},
) *VolumeRequest {
	capability := req.GetVolumeCapability()
	return &VolumeRequest{
		VolumeID: req.GetVolumeId(), Capability: capability, group: capability.GetMount().GetVolumeMountGroup(),
		Input: policy.Input{
			Driver: driver, FSType: cmp.Or(capability.GetMount().GetFsType(), defaultFSType),
			AccessMode: capability.GetAccessMode().GetMode().String(), Context: req.GetVolumeContext(),
		},
	}
}

// maxObjectName is the longest name that Kubernetes accepts.
const maxObjectName = 253

// NamePod names the pod, and its claim of the volume, as the cluster does.
func (r *VolumeRequest) NamePod(pod *Pod) {
	r.PodUID, r.PodNamespace, r.PodName = pod.UID, refusal.OneLine(pod.Namespace), refusal.OneLine(pod.Name)
	if found := pod.volumesOf(r.Driver, r.VolumeID, ""); len(found) > 0 {
		r.PVC = refusal.OneLine(found[0].Claim)
	}
}

// inlineIDForm is the volume id that kubelet makes up for an inline volume.
var inlineIDForm = sys.LazyRegexp(`^csi-[0-9a-f]{64}$`)

// IsInlineID reports whether kubelet made up the volume id, for an inline volume.
func IsInlineID(id string) bool { return inlineIDForm().MatchString(id) }

// readerOnly are the access modes that forbid writing.
var readerOnly = []csi.VolumeCapability_AccessMode_Mode{
	csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY,
	csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY,
}

// severalNodes are the access modes in which another node may write too.
var severalNodes = []csi.VolumeCapability_AccessMode_Mode{
	csi.VolumeCapability_AccessMode_MULTI_NODE_SINGLE_WRITER,
	csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER,
}

// MountFlags are the mount options for the sandbox, one per element. Labels that kubelet adds for the host's SELinux
// mean nothing in a sandbox without SELinux, and fail the mount there.
func MountFlags(flags []string, readOnly, keepLabels bool) (out []string) {
	for _, flag := range mountopt.Split(flags) {
		name, _, _ := strings.Cut(flag, "=")
		isLabel := slices.Contains([]string{"context", "fscontext", "defcontext", "rootcontext"}, name)
		if (isLabel && !keepLabels) || (readOnly && (flag == "rw" || flag == "ro")) {
			continue
		}
		out = append(out, flag)
	}
	if readOnly {
		out = append(out, "ro")
	}
	return out
}

// Group is the group that shall own the files: that of the request, else that of the pod,
// where the pod's group is for this volume. The pod is nil where it is not known.
func Group(req *VolumeRequest, pod *PodContext) (string, volume.GroupPolicy) {
	group, change := req.group, req.groupPolicy
	if pod == nil || req.ReadOnly { // kubelet changes nothing on a read-only volume either
		return group, change
	}
	noGroup := func(v PodVolume) bool { return v.NoGroup && v.Driver == req.Driver && v.VolumeID == req.VolumeID }
	if group == "" && !slices.ContainsFunc(pod.Pod.Volumes, noGroup) {
		group = pod.Pod.FSGroup
	}
	if change == "" && group != "" {
		change = pod.Pod.FSGroupPolicy
	}
	return group, change
}
