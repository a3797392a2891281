package csi

import (
	"cmp"
	"context"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/decision"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
	"github.com/crust-proxy/crust-proxy/internal/front/kubelet"
	"github.com/crust-proxy/crust-proxy/internal/front/passthrough"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/internal/ground/rpccode"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// driverProxy answers the Node calls of one driver.
type driverProxy struct {
	front  *Front
	driver *staging.Driver
	stager *staging.Stager
	log    *zap.Logger
}

// forwardFunc sends kubelet's own request to the driver.
type forwardFunc = func(ctx context.Context) (reply []byte, err error)

// answerFunc answers one call in the driver's place, or forwards it.
type answerFunc = func(p *driverProxy, ctx context.Context, raw []byte, forward forwardFunc) ([]byte, error)

// intercepted are the methods that the front answers itself where a volume is deferred.
var intercepted = map[string]answerFunc{
	csi.Node_NodeGetCapabilities_FullMethodName: (*driverProxy).getCapabilities,
	csi.Node_NodeStageVolume_FullMethodName:     parsed((*driverProxy).stageVolume),
	csi.Node_NodeUnstageVolume_FullMethodName:   parsed((*driverProxy).unstageVolume),
	csi.Node_NodePublishVolume_FullMethodName:   parsed((*driverProxy).publishVolume),
	csi.Node_NodeUnpublishVolume_FullMethodName: parsed((*driverProxy).unpublishVolume),
	csi.Node_NodeGetVolumeStats_FullMethodName:  parsed((*driverProxy).getVolumeStats),
	csi.Node_NodeGetVolumeHealth_FullMethodName: parsed((*driverProxy).getVolumeHealth),
	csi.Node_NodeExpandVolume_FullMethodName:    parsed((*driverProxy).expandVolume),
}

// parsed makes an answerFunc of a method that takes the parsed request.
func parsed[M any, Request interface {
	*M
	proto.Message
}](answer func(*driverProxy, context.Context, Request, forwardFunc) ([]byte, error)) answerFunc {
	return func(p *driverProxy, ctx context.Context, raw []byte, forward forwardFunc) ([]byte, error) {
		req := Request(new(M))
		if err := proto.Unmarshal(raw, req); err != nil {
			return nil, decision.Unreadable(err)
		}
		return answer(p, ctx, req, forward)
	}
}

// Answered lists the intercepted methods. The front words their errors itself.
func Answered() map[string]bool {
	methods := make(map[string]bool, len(intercepted))
	for method := range intercepted {
		methods[method] = true
	}
	return methods
}

// Driver makes the proxy that kubelet uses in place of the driver.
func (f *Front) Driver(name string, conn grpc.ClientConnInterface) *passthrough.Proxy {
	p := &driverProxy{front: f, driver: staging.NewDriver(name, conn, f.cfg.Writing), log: f.cfg.Log.With(zap.String(telemetry.FieldDriver, name))}
	p.stager = staging.NewStager(p.driver, f.store, p.couldDefer, p.log)
	local := make(map[string]passthrough.Local, len(intercepted))
	for method, answer := range intercepted {
		local[method] = func(ctx context.Context, raw []byte, forward passthrough.Forward) ([]byte, error) {
			ctx, cancel := p.withDeadline(ctx)
			defer cancel()
			reply, err := answer(p, ctx, raw, func(ctx context.Context) ([]byte, error) {
				reply, err := forward(ctx, raw)
				telemetry.CallFrom(ctx).Forwarded = err != nil
				return reply, err
			})
			return reply, rpccode.Status(err)
		}
	}
	return passthrough.New(conn, local)
}

// withDeadline gives a deadline to a call that came without one.
func (p *driverProxy) withDeadline(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, p.front.cfg.DriverTimeout)
}

func (p *driverProxy) couldDefer(req *csi.NodeStageVolumeRequest) bool {
	has := p.driver.LastCapabilities() // nil: it has not told yet
	return has == nil || has.Native ||
		p.front.policy.Load().CouldDefer(decision.StageRequest(p.driver.Name, p.front.cfg.DefaultFSType, req).Input)
}

// offered are the capabilities that are reported to kubelet whatever the driver has: without
// them kubelet never asks for stats, growth or health of a driver's volumes.
func (p *driverProxy) offered() []csi.NodeServiceCapability_RPC_Type {
	all := []csi.NodeServiceCapability_RPC_Type{
		csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
		csi.NodeServiceCapability_RPC_EXPAND_VOLUME,
		csi.NodeServiceCapability_RPC_GET_VOLUME_HEALTH,
	}
	if p.front.cfg.VolumeCondition {
		all = append(all, volumeConditionCapability)
	}
	return all
}

// getCapabilities answers with the driver's capabilities and ours.
func (p *driverProxy) getCapabilities(ctx context.Context, _ []byte, forward forwardFunc) ([]byte, error) {
	answer, err := forward(ctx)
	if err != nil {
		return nil, err
	}
	reply := &csi.NodeGetCapabilitiesResponse{}
	if err := proto.Unmarshal(answer, reply); err != nil {
		return answer, nil //nolint:nilerr // kubelet gets an answer that cannot be parsed as it is
	}
	p.driver.ObserveCapabilities(reply)
	added := false
	for _, kind := range p.offered() {
		has := func(c *csi.NodeServiceCapability) bool { return c.GetRpc().GetType() == kind }
		if !slices.ContainsFunc(reply.GetCapabilities(), has) {
			added = true
			reply.Capabilities = append(reply.Capabilities, &csi.NodeServiceCapability{
				Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: kind}},
			})
		}
	}
	if !added {
		return answer, nil
	}
	return proto.Marshal(reply)
}

// withLock runs a call that changes a volume under the volume's lock. The driver itself
// refuses a request without a volume or path.
func (p *driverProxy) withLock(
	ctx context.Context, volumeID, path string, forward forwardFunc, run func(staging.VolumeID) ([]byte, error),
) ([]byte, error) {
	if volumeID == "" || path == "" {
		return forward(ctx)
	}
	id := p.driver.ID(volumeID)
	unlock, err := p.front.lock(ctx, id)
	if err != nil {
		return nil, err
	}
	defer unlock()
	return run(id)
}

// stageVolume decides, and has the driver stage a filesystem or only a device.
func (p *driverProxy) stageVolume(ctx context.Context, req *csi.NodeStageVolumeRequest, forward forwardFunc) ([]byte, error) {
	if req.GetVolumeCapability().GetMount() == nil {
		return forward(ctx) // a raw block volume has no filesystem
	}
	return p.withLock(ctx, req.GetVolumeId(), req.GetStagingTargetPath(), forward, func(id staging.VolumeID) ([]byte, error) {
		call := &stageCall{
			proxy: p, req: req, rec: p.front.store.Records.Get(id),
			w: decision.StageRequest(p.driver.Name, p.front.cfg.DefaultFSType, req), forward: forward,
		}
		call.w.Mark = p.front.marker().of(id)
		reply, err := call.run(ctx)
		if err != nil && call.rec.Stage == nil {
			p.front.store.ForgetRequest(id) // kubelet does not ask to unstage it
		}
		return reply, err
	})
}

func (p *driverProxy) unstageVolume(ctx context.Context, req *csi.NodeUnstageVolumeRequest, forward forwardFunc) ([]byte, error) {
	return p.withLock(ctx, req.GetVolumeId(), req.GetStagingTargetPath(), forward, func(id staging.VolumeID) ([]byte, error) {
		if err := p.driver.CheckWriting(id.ID); err != nil {
			return nil, err
		}
		return p.unstage(ctx, id, req.GetStagingTargetPath(), forward)
	})
}

// publishVolume decides whether the pod's sandbox is to mount the volume, and hands it
// over, or lets the driver mount it.
func (p *driverProxy) publishVolume(ctx context.Context, req *csi.NodePublishVolumeRequest, forward forwardFunc) ([]byte, error) {
	if err := decision.CheckDeferralFields(req); err != nil {
		return nil, err
	}
	isBlock := req.GetVolumeCapability().GetBlock() != nil
	if !isBlock && req.GetVolumeCapability().GetMount() == nil {
		return forward(ctx)
	}
	return p.withLock(ctx, req.GetVolumeId(), req.GetTargetPath(), forward, func(id staging.VolumeID) ([]byte, error) {
		w := decision.PublishRequest(p.driver.Name, p.front.cfg.DefaultFSType, req)
		if isBlock {
			return p.publishRaw(ctx, id, w, forward)
		}
		w.Mark = p.front.marker().of(id)
		call, err := newPublishCall(p, req, w, forward)
		if err != nil {
			return nil, err
		}
		return call.run(ctx)
	})
}

// publishRaw lets the driver publish a raw block volume. The target is recorded before: its
// pod may open the device at any time, so no sandbox gets it then. The caller holds the
// volume's lock.
func (p *driverProxy) publishRaw(ctx context.Context, id staging.VolumeID, w *decision.VolumeRequest, forward forwardFunc) ([]byte, error) {
	if err := decision.CheckRawDevice(w, p.front.cfg.Volumes.OfOrigin(id.Driver, id.ID)); err != nil {
		return nil, err
	}
	if err := cmp.Or(p.front.refuseHeld(ctx, id), p.front.refuseLost(id, "")); err != nil {
		return nil, err
	}
	if err := p.driver.CheckWriting(id.ID); err != nil {
		return nil, err
	}
	rec := p.front.store.Records.Get(id)
	_, known := rec.Raw[w.Path]
	if !known {
		if rec.Raw == nil {
			rec.Raw = make(map[string]bool)
		}
		rec.Raw[w.Path] = w.ReadOnly
		p.stager.RecordOnHost(&rec)
	}
	reply, err := forward(ctx)
	if err != nil && !known && refusal.IsFinal(err) {
		rec = p.front.store.Records.Get(id) // a copy: others read the one that was put
		delete(rec.Raw, w.Path)
		p.stager.RecordOnHost(&rec)
	}
	return reply, err
}

func (p *driverProxy) unpublishVolume(ctx context.Context, req *csi.NodeUnpublishVolumeRequest, forward forwardFunc) ([]byte, error) {
	return p.withLock(ctx, req.GetVolumeId(), req.GetTargetPath(), forward, func(id staging.VolumeID) ([]byte, error) {
		if err := p.driver.CheckWriting(id.ID); err != nil {
			return nil, err
		}
		return (&unpublishCall{proxy: p, id: id, target: req.GetTargetPath(), forward: forward}).run(ctx)
	})
}

// find looks up the deferred volume of a stats or expand call: by its target, else by its
// id, for kubelet may name the staging path instead. While one is being removed a sandbox
// may still have its device.
func (p *driverProxy) find(volumeID, path, stagingPath string) (found deferral.Status, deferred bool, err error) {
	at, ok, err := p.front.find(path)
	if err != nil {
		return at, false, err
	}
	if ok && decision.CheckSameVolume(at.Volume, p.driver.Name, volumeID) == nil {
		return at, true, nil
	}
	for _, status := range p.front.cfg.Volumes.OfOrigin(p.driver.Name, volumeID) {
		staged := status.Origin.Staging
		if staged != "" && (staged == path || staged == stagingPath) && (!deferred || !status.Removing) {
			found, deferred = status, true
		}
	}
	return found, deferred, nil
}

// isStagedAsDevice reports whether the driver has staged the volume as a device. Then it
// knows nothing of kubelet's paths, also while no pod has the volume.
func (p *driverProxy) isStagedAsDevice(volumeID, path string) bool {
	stage := p.front.store.Records.Get(p.driver.ID(volumeID)).Stage
	return stage != nil && stage.At == staging.StagedAsDevice && !kubelet.IsRawBlock(path)
}

// getVolumeStats asks the sandbox of a deferred volume. It takes no lock, so that it does not
// wait for a driver or another call that hangs.
func (p *driverProxy) getVolumeStats(ctx context.Context, req *csi.NodeGetVolumeStatsRequest, forward forwardFunc) ([]byte, error) {
	found, deferred, err := p.find(req.GetVolumeId(), req.GetVolumePath(), req.GetStagingTargetPath())
	if err != nil {
		return nil, err
	}
	if !deferred && p.isStagedAsDevice(req.GetVolumeId(), req.GetVolumePath()) {
		return nil, statsOfNoPod(req.GetVolumePath())
	}
	if !deferred {
		if has := p.driver.LastCapabilities(); has != nil && !has.Stats {
			// kubelet then has no stats of the volume, as without the front, and logs
			// nothing. An empty answer would mean zeros to it.
			telemetry.CallFrom(ctx).Expected = true
			return nil, noStats(p.driver.Name)
		}
		return forward(ctx)
	}
	annotateCall(ctx, &found)
	answer, err := p.front.cfg.Sandboxes.Stats(ctx, found.Volume)
	if err != nil {
		return nil, namingPod(found.Volume, err)
	}
	return proto.Marshal(statsReply(&answer.Report))
}

// expandVolume grows a deferred volume: the driver its device, the sandbox its
// filesystem. kubelet also calls before there is a sandbox, and then any error but
// FAILED_PRECONDITION keeps the pod from ever starting.
func (p *driverProxy) expandVolume(ctx context.Context, req *csi.NodeExpandVolumeRequest, forward forwardFunc) ([]byte, error) {
	has := p.driver.LastCapabilities()
	found, deferred, err := p.find(req.GetVolumeId(), req.GetVolumePath(), req.GetStagingTargetPath())
	if err != nil {
		return nil, err
	}
	if !deferred && p.isStagedAsDevice(req.GetVolumeId(), req.GetVolumePath()) {
		return nil, growthOfNoPod(req.GetVolumePath())
	}
	if !deferred && has != nil && !has.Expand {
		// Without the front kubelet would not ask, and regard it as done.
		return proto.Marshal(&csi.NodeExpandVolumeResponse{CapacityBytes: req.GetCapacityRange().GetRequiredBytes()})
	}
	if !deferred {
		return forward(ctx)
	}
	return p.expandDeferred(ctx, req, &found, has != nil && has.Native, forward)
}

// expandDeferred is expandVolume for a deferred volume. native is whether the driver defers by
// itself.
func (p *driverProxy) expandDeferred(
	ctx context.Context, req *csi.NodeExpandVolumeRequest, found *deferral.Status, native bool, forward forwardFunc,
) ([]byte, error) {
	annotateCall(ctx, found)
	if found.Removing {
		return nil, beingRemoved(found.Target)
	}
	asDevice, err := p.front.store.Private.Published(p.driver.ID(req.GetVolumeId()), req.GetVolumePath())
	if found.Origin == nil && (asDevice || err != nil) {
		return nil, recordUnusable(found.Target)
	}
	if found.Origin == nil && !native {
		return forward(ctx) // the driver published it through the Runtime API, and grows it in the same way
	}
	if err := checkRange(found.Target, req.GetCapacityRange()); err != nil {
		return nil, err
	}
	unlock, err := p.front.lock(ctx, p.driver.ID(req.GetVolumeId()))
	if err != nil {
		return nil, err
	}
	defer unlock()
	size, err := (&expandCall{proxy: p, req: req, v: found.Volume}).run(ctx)
	if err != nil {
		return nil, namingPod(found.Volume, err)
	}
	return proto.Marshal(&csi.NodeExpandVolumeResponse{CapacityBytes: size})
}

// namingPod adds the pod on record to the error of a call for a deferred volume.
func namingPod(v *volume.Volume, err error) error {
	if v == nil || v.Origin == nil || v.Origin.PodName == "" {
		return err
	}
	return refusal.Sentence(&volume.Refusal{Target: v.Target, PodNamespace: v.Origin.PodNamespace, PodName: v.Origin.PodName}, err)
}

// refusalDraft returns what is known of a volume that may be refused.
func (p *driverProxy) refusalDraft(w *decision.VolumeRequest, verdict *policy.Verdict, pod *decision.Pod) volume.Refusal {
	out := volume.Refusal{
		Target: w.Path, Driver: p.driver.Name, VolumeID: refusal.Clip(w.VolumeID), FSType: refusal.Clip(w.FSType),
		AccessMode: w.AccessMode, Rule: verdict.Rule, Handler: p.front.rules().Handler(verdict),
	}
	if pod != nil {
		out.PodUID = pod.UID
		out.PodNamespace, out.PodName = decision.PodNames(pod, w)
	}
	return out
}

// recordRefusal ends a stage or a publish: an error is listed as a refusal and becomes one
// sentence, for kubelet shows it with the pod. Success removes the volume from the list.
func (p *driverProxy) recordRefusal(draft volume.Refusal, err error) error {
	if err == nil {
		p.front.forgetRefusal(draft.Target)
		return nil
	}
	if status.Code(rpccode.Status(err)) == codes.Canceled {
		return err // kubelet went away, and nobody refused
	}
	party := refusal.PartyOf(err)
	draft.Key = p.front.key(draft.Target)
	err = refusal.Sentence(&draft, err)
	draft.Party, draft.Error = party, status.Convert(err).Message()
	p.front.refused.Add(draft)
	p.front.cfg.OnRefused(p.driver.Name, party)
	return err
}
