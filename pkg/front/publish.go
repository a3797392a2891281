package front

import (
	"context"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// heldOnHost is the word for a volume that the host has mounted for some pod: it
// stays as it is until no pod has it.
const heldOnHost = "held as it is while a pod has it"

// publish is one NodePublishVolume of a filesystem volume. Its caller has the
// volume's turn.
type publish struct {
	*node
	req     *csi.NodePublishVolumeRequest
	w       wanted
	target  string
	rec     volumeRecord
	living  []deferral.Status // this CSI volume, deferred, for other pods
	before  *deferral.Status  // this target, where it is published already
	pod     *forPod           // nil where no cluster is asked, or need not be
	verdict deferral.Verdict
	forward func(ctx context.Context) ([]byte, error) // as kubelet asked
}

// publishVolume decides whether the pod's sandbox is to mount the volume, and
// hands it over, or lets the driver mount it.
func (n *node) publishVolume(ctx context.Context, raw []byte, forward forwardFunc) ([]byte, error) {
	req := &csi.NodePublishVolumeRequest{}
	if err := proto.Unmarshal(raw, req); err != nil {
		return nil, unreadable(err)
	}
	requested, err := requestedDeferral(req)
	if err != nil {
		return nil, err
	}
	if req.GetVolumeCapability().GetMount() == nil || req.GetVolumeId() == "" || req.GetTargetPath() == "" {
		return forward(ctx, raw)
	}
	end, err := n.turns.take(ctx, n.id(req.GetVolumeId()))
	if err != nil {
		return nil, err
	}
	defer end()
	p := n.newPublish(req)
	p.forward = func(ctx context.Context) ([]byte, error) { return forward(ctx, raw) }
	err = p.decide(ctx, requested)
	if err == nil && !p.verdict.Defer {
		return p.asAsked(ctx)
	}
	var reply []byte
	if err == nil {
		reply, err = p.deferred(ctx)
	}
	return reply, n.tell(p.refusal(), err)
}

// refusal is what is known of the publish, should it be refused.
func (p *publish) refusal() deferral.Refusal {
	out := p.node.refusal(p.w, p.verdict)
	out.Target = p.target
	if p.pod != nil {
		out.PodUID = p.pod.UID
		out.PodNamespace, out.PodName = podNames(p.pod.Pod, p.w)
		return out
	}
	out.PodUID, _ = p.podUID(p.w, p.target) // where the two differ that is the error
	out.PodNamespace, out.PodName = podNames(nil, p.w)
	return out
}

// requestedDeferral reads what the CO itself asks for, and refuses what KEP-2857
// refuses.
func requestedDeferral(req *csi.NodePublishVolumeRequest) (bool, error) {
	requested := csidefer.Requested(req)
	group, policy, err := csidefer.Group(req.GetVolumeCapability())
	switch {
	case err != nil:
		return false, unreadable(err)
	case requested && req.GetVolumeCapability().GetBlock() != nil:
		return false, deferral.Errorf(deferral.Invalid, "volume %s: defer_fs_ops is set for a raw block volume, "+
			"which has no filesystem", clip(req.GetTargetPath()))
	case !requested && (group != "" || policy != ""):
		return false, deferral.Errorf(deferral.Invalid, "volume %s: a supplemental group or its change policy comes "+
			"without defer_fs_ops", clip(req.GetTargetPath()))
	}
	return requested, nil
}

func (n *node) newPublish(req *csi.NodePublishVolumeRequest) *publish {
	p := &publish{node: n, req: req, w: n.wantedBy(req), target: req.GetTargetPath()}
	p.rec = n.records.get(p.w.id)
	// A target that cannot be resolved is no deferred one.
	if found, ok, err := n.cfg.Volumes.Find(p.target); err == nil && ok && !found.Removing {
		p.before = &found
	}
	for _, status := range n.cfg.Volumes.OfCSI(n.name, p.w.id.id) {
		if p.before == nil || status.Key != p.before.Key {
			p.living = append(p.living, status)
		}
	}
	return p
}

// decide gives the verdict: that of before where the target is published, that
// of the other pods where there are some and nothing in this request says
// otherwise, else the policy's. What is published already waits for no cluster.
func (p *publish) decide(ctx context.Context, requested bool) (err error) {
	if p.before != nil {
		p.verdict = verdictOf(p.before)
		return nil
	}
	if slices.Contains(p.rec.Plain, p.target) || driverMounted(p.req.GetStagingTargetPath(), p.target) {
		p.verdict.Rule = heldOnHost
		return nil
	}
	if p.pod, err = p.podFor(ctx, p.w, p.target); err != nil {
		return err
	}
	if p.verdict, err = p.node.decide(p.w, requested, p.pod); err != nil {
		return err
	}
	if err := p.agree(requested); err != nil {
		return err
	}
	return p.checkContainers()
}

// checkContainers refuses what the pod's containers cannot be given of a volume
// that its sandbox mounts.
func (p *publish) checkContainers() error {
	if !p.verdict.Defer || p.pod == nil {
		return nil
	}
	if p.pod.volume == nil {
		return p.pod.missing // it may be mounted in a way that does not work: never a guess
	}
	sub := p.pod.volume.SubPaths
	if len(sub) == 0 || p.cfg.Volumes.Abilities(p.verdict.Handler).SubPaths {
		return nil
	}
	return by(deferral.PartyHandler, deferral.Errorf(deferral.Unsupported, "volume %s: it is to be deferred (%s), a container mounts its "+
		"sub-directory %q by subPath, and sandboxes of the handler %s show whole volumes only: mount all of it and use the "+
		"sub-directory in the container, or exclude it by a policy rule", p.target, p.verdict.Rule, clip(sub[0]), p.handler(p.verdict)))
}

// verdictOf is what was decided for a volume on record. Its rule is empty where
// the driver published it through the Runtime API by itself.
func verdictOf(status *deferral.Status) deferral.Verdict {
	v := deferral.Verdict{Defer: true, Handler: status.Handler, Format: deferral.FormatNever}
	if status.CSI != nil {
		v.Rule = status.CSI.Rule
	}
	return v
}

// agree holds the verdict to that of the pods that have the volume already: the
// sandbox of one and the host's kernel for another would destroy the filesystem.
func (p *publish) agree(requested bool) error {
	others := p.others()
	if len(others) == 0 {
		return nil
	}
	theirs := len(p.living) > 0
	if p.verdict.Defer == theirs {
		return nil
	}
	if requested || p.pod != nil || (theirs && p.living[0].CSI.Rule == deferral.RuleRequested) {
		return by(deferral.PartyVolume, deferral.Errorf(deferral.InUse, "volume %s: it is to be %s (%s), and the volume is %s for %s: "+
			"it can be published in one way at a time; wait until the other pod is gone", p.target, deferredOrNot(p.verdict.Defer),
			p.verdict.Rule, deferredOrNot(theirs), others[0]))
	}
	if theirs {
		p.verdict = verdictOf(&p.living[0])
		return nil
	}
	p.verdict = deferral.Verdict{Rule: heldOnHost}
	return nil
}

func (p *publish) others() []string {
	var others []string
	for i := range p.living {
		others = append(others, holder(&p.living[i]))
	}
	return append(others, slices.DeleteFunc(slices.Clone(p.rec.Plain), func(t string) bool { return t == p.target })...)
}

// holder is who has a volume: its pod, where that is known, else where it is
// published.
func holder(status *deferral.Status) string {
	if csi := status.CSI; csi != nil && csi.PodName != "" {
		return "the pod " + csi.PodNamespace + "/" + csi.PodName
	}
	return status.Target
}

func deferredOrNot(deferred bool) string {
	if deferred {
		return "deferred"
	}
	return "mounted on the host"
}

// asAsked lets the driver mount the volume. The target is on record before: a
// pod that has the volume keeps it from being deferred for another.
func (p *publish) asAsked(ctx context.Context) ([]byte, error) {
	if p.rec.Stage != nil && p.rec.Stage.At != stagedAtPath {
		if err := p.restage(ctx, &p.rec, false, p.verdict.Rule); err != nil {
			return nil, p.tell(p.refusal(), err)
		}
	}
	p.forgetTarget(p.target) // it may have been refused, and the policy says otherwise now
	known := slices.Contains(p.rec.Plain, p.target)
	if !known {
		p.rec.Plain = append(p.rec.Plain, p.target)
		p.keep()
	}
	reply, err := p.forward(ctx)
	if err != nil && !known && final(err) {
		p.rec.Plain = slices.DeleteFunc(p.rec.Plain, func(t string) bool { return t == p.target })
		p.keep()
	}
	return reply, err
}

// keep writes the record of a volume that is not deferred. A full run directory
// does not keep it from its pod: the kernel's own claim still stands between it
// and a second owner.
func (p *publish) keep() {
	if err := p.records.put(p.rec); err != nil {
		p.complain(err)
	}
}

// deferred hands the volume to the sandbox, in one of two ways.
func (p *publish) deferred(ctx context.Context) ([]byte, error) {
	if p.before != nil && p.before.CSI == nil {
		return p.forward(ctx) // the driver publishes it through the Runtime API by itself
	}
	has, err := p.capabilities(ctx)
	if err != nil {
		return nil, err
	}
	ro := readOnly(p.req)
	if err := p.checkDeferrable(p.w, p.verdict, p.target, ro); err != nil {
		return nil, err
	}
	if err := p.refuseSecondWriter(ro); err != nil {
		return nil, err
	}
	if p.way(has) == deferral.WayNative {
		return p.native(ctx, has)
	}
	return p.block(ctx, has)
}

// way is that of before where the volume is published: a driver that was
// downgraded cannot be asked to defer any more.
func (p *publish) way(has *capabilities) string {
	switch {
	case p.before != nil:
		return p.before.CSI.Way
	case has.native:
		return deferral.WayNative
	default:
		return deferral.WayBlock
	}
}

// refuseSecondWriter says early what the claim on the device would say late: a
// driver need not be bothered with it.
func (p *publish) refuseSecondWriter(ro bool) error {
	for i := range p.living {
		if other := &p.living[i]; !ro || !other.ReadOnly {
			return by(deferral.PartyVolume, deferral.Errorf(deferral.InUse, "volume %s: the volume is published for %s: one sandbox can "+
				"have it read-write, or several read-only; wait until the other pod is gone%s", p.target, holder(other), p.couldBeReader(ro)))
		}
	}
	return nil
}

// couldBeReader is advice for a pod that writes nothing and does not say so:
// kubelet tells a driver of the claim's readOnly only, not of the containers'.
func (p *publish) couldBeReader(ro bool) string {
	if ro || p.pod == nil || p.pod.volume == nil || !p.pod.volume.ReadOnlyMounts {
		return ""
	}
	return "; or, as every container of this pod mounts it read-only, say readOnly: true in the persistentVolumeClaim volume " +
		"of each pod that only reads, then several pods can share it"
}

// instruct gives the broker what the sandbox shall mount.
func (p *publish) instruct(ctx context.Context, in deferral.Instruction, has *capabilities) error {
	owner, policy, err := p.group()
	if err != nil {
		return by(deferral.PartyRequest, err)
	}
	in.Target, in.Driver, in.Handler = p.target, p.name, p.verdict.Handler
	in.Group, in.GroupPolicy = owner, policy
	in.CSI.VolumeID, in.CSI.Rule, in.CSI.AccessMode = p.w.id.id, p.verdict.Rule, p.w.mode().String()
	if p.pod != nil {
		in.CSI.PodNamespace, in.CSI.PodName = podNames(p.pod.Pod, p.w)
	} else {
		in.CSI.PodNamespace, in.CSI.PodName = podNames(nil, p.w)
	}
	if has.stage {
		in.CSI.Staging = p.req.GetStagingTargetPath()
	}
	_, err = p.cfg.Volumes.Stage(ctx, in)
	return byBroker(err)
}

// group is who shall own the files. Where the volume is published that is on
// record, so that nobody needs to be asked again.
func (p *publish) group() (string, deferral.GroupPolicy, error) {
	var pod *Pod
	if p.pod != nil && !readOnly(p.req) { // kubelet changes nothing on a read-only volume either
		pod = p.pod.Pod
	}
	owner, policy, err := group(p.req.GetVolumeCapability(), pod, p.w.id)
	if err == nil && owner == "" && p.before != nil {
		return p.before.Group, p.before.GroupPolicy, nil
	}
	return owner, policy, err
}
