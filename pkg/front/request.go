package front

import (
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// wanted is the part of a stage or publish request that decides.
type wanted struct {
	id         volumeID
	context    map[string]string
	capability *csi.VolumeCapability
}

func (n *node) wantedBy(req interface {
	GetVolumeId() string
	GetVolumeContext() map[string]string
	GetVolumeCapability() *csi.VolumeCapability
},
) wanted {
	return wanted{id: n.id(req.GetVolumeId()), context: req.GetVolumeContext(), capability: req.GetVolumeCapability()}
}

func (w wanted) mode() csi.VolumeCapability_AccessMode_Mode {
	return w.capability.GetAccessMode().GetMode()
}

func (n *node) fsType(w wanted) string {
	if named := w.capability.GetMount().GetFsType(); named != "" {
		return named
	}
	return n.cfg.DefaultFSType
}

// decide asks the policy, for a pod where one is known.
func (n *node) decide(w wanted, requested bool, pod *forPod) (deferral.Verdict, error) {
	wish := deferral.Wish{
		Driver: n.name, FSType: n.fsType(w), AccessMode: w.mode().String(), Requested: requested, Context: w.context,
	}
	if pod != nil {
		wish.RuntimeHandler, wish.RuntimeHandlerKnown, wish.Annotated = pod.RuntimeHandler, true, pod.annotated
	}
	verdict, err := n.policy.Load().Decide(wish)
	return verdict, by(deferral.PartyPolicy, err)
}

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

func readOnly(req *csi.NodePublishVolumeRequest) bool {
	return req.GetReadonly() || slices.Contains(readerOnly, req.GetVolumeCapability().GetAccessMode().GetMode())
}

// checkDeferrable refuses what no driver may be asked for: block access would
// take away the protection that the driver gives to a filesystem that several
// nodes mount.
func (n *node) checkDeferrable(w wanted, verdict deferral.Verdict, where string, readOnly bool) error {
	if !readOnly && slices.Contains(severalNodes, w.mode()) {
		return by(deferral.PartyVolume, deferral.Errorf(deferral.Unsupported, "volume %s: it is to be deferred (%s), and its access "+
			"mode %s lets several nodes write, which destroys a filesystem on a device: use ReadWriteOnce or ReadWriteOncePod, or "+
			"exclude it by a policy rule", where, verdict.Rule, w.mode()))
	}
	return nil
}

func (n *node) checkBlockWay(w wanted, verdict deferral.Verdict, where string) error {
	if w.context[ephemeralKey] == "true" {
		return n.noInline(verdict, where)
	}
	return nil
}

func (n *node) noInline(verdict deferral.Verdict, where string) error {
	return by(deferral.PartyDriver, deferral.Errorf(deferral.Unsupported, "volume %s: it is to be deferred (%s), and the driver "+
		"%s cannot defer by itself: an inline ephemeral volume cannot be asked for as a block device; use a generic ephemeral "+
		"volume (a volumeClaimTemplate), or exclude it by a policy rule", where, verdict.Rule, n.name))
}

// asBlock is the capability that a driver is asked for in place of a mount.
func asBlock(capability *csi.VolumeCapability) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
		AccessMode: capability.GetAccessMode(),
	}
}

// mountFlags are the options for the sandbox. Labels that kubelet adds for the
// host's SELinux mean nothing in a sandbox without it, and fail the mount there.
func (n *node) mountFlags(capability *csi.VolumeCapability, handler string, readOnly bool) []string {
	keepLabels := n.cfg.Volumes.Abilities(handler).SELinux
	var flags []string
	for _, flag := range capability.GetMount().GetMountFlags() {
		if (!keepLabels && isLabel(flag)) || (readOnly && (flag == "rw" || flag == "ro")) {
			continue
		}
		flags = append(flags, flag)
	}
	if readOnly {
		flags = append(flags, "ro")
	}
	return flags
}

func isLabel(flag string) bool {
	name, _, _ := strings.Cut(flag, "=")
	return slices.Contains([]string{"context", "fscontext", "defcontext", "rootcontext"}, name)
}

// group is who shall own the files: by the request, else by the pod, where its
// group is for this volume.
func group(capability *csi.VolumeCapability, pod *Pod, id volumeID) (string, deferral.GroupPolicy, error) {
	asked, policy, err := csidefer.Group(capability)
	if err != nil {
		return "", "", deferral.Errorf(deferral.Invalid, "the volume capability cannot be read: %w", err)
	}
	if asked == "" {
		asked = capability.GetMount().GetVolumeMountGroup()
	}
	if asked == "" && pod != nil && pod.groupFor(id) {
		asked = pod.FSGroup
	}
	if policy == "" && pod != nil && asked != "" {
		policy = string(pod.FSGroupPolicy)
	}
	return asked, deferral.GroupPolicy(policy), nil
}

// groupFor tells whether the pod's group is for the files of a volume.
func (p *Pod) groupFor(id volumeID) bool {
	return !slices.ContainsFunc(p.Volumes, func(v PodVolume) bool {
		return v.NoGroup && v.Driver == id.driver && v.VolumeID == id.id
	})
}
