package csi

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/decision"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
	"github.com/crust-proxy/crust-proxy/internal/front/kubelet"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/internal/ground/rpccode"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// driverProxy is what the Node calls of one driver work with.
type driverProxy struct {
	front   *Front
	cfg     *Config
	volumes Volumes
	records *staging.Records
	private *staging.PrivatePaths
	marks   *staging.Marks
	driver  *staging.Driver
	stager  *staging.Stager
	log     *zap.Logger
	failed  atomic.Pointer[time.Time] // see logHealth
}

// forwardFunc sends kubelet's own request to the driver.
type forwardFunc = func(ctx context.Context) (reply []byte, err error)

// answerFunc answers one call in the driver's place, or forwards it.
type answerFunc = func(ctx context.Context, p *driverProxy, raw []byte, forward forwardFunc) ([]byte, error)

// intercepted are the methods that the front answers itself where a volume is deferred.
var intercepted = map[string]answerFunc{
	csi.Node_NodeGetCapabilities_FullMethodName:  getCapabilities,
	csi.Node_NodeStageVolume_FullMethodName:      parsed(stageVolume),
	csi.Node_NodeUnstageVolume_FullMethodName:    parsed(unstageVolume),
	csi.Node_NodePublishVolume_FullMethodName:    parsed(publishVolume),
	csi.Node_NodeUnpublishVolume_FullMethodName:  parsed(unpublishVolume),
	csi.Node_NodeGetVolumeStats_FullMethodName:   parsed(getVolumeStats),
	csi.Node_NodeGetVolumeHealth_FullMethodName:  parsed(getVolumeHealth),
	csi.Node_NodeExpandVolume_FullMethodName:     parsed(expandVolume),
	csi.Node_NodeGetStorageHealth_FullMethodName: getStorageHealth,
}

// parsed makes an answerFunc of a function that takes the parsed request.
func parsed[M any, Request interface {
	*M
	proto.Message
	GetVolumeId() string
}](answer func(context.Context, *driverProxy, Request, forwardFunc) ([]byte, error)) answerFunc {
	return func(ctx context.Context, p *driverProxy, raw []byte, forward forwardFunc) ([]byte, error) {
		req := Request(new(M))
		if err := proto.Unmarshal(raw, req); err != nil {
			return nil, decision.Unreadable(err)
		}
		call := telemetry.CallFrom(ctx)
		call.CSIVolume = refusal.Clip(req.GetVolumeId())
		switch r := any(req).(type) {
		case interface{ GetTargetPath() string }:
			call.Target = r.GetTargetPath()
		case interface{ GetVolumePath() string }:
			call.Target = r.GetVolumePath()
		case interface{ GetVolumePublishPath() string }:
			call.Target = r.GetVolumePublishPath()
		case interface{ GetStagingTargetPath() string }:
			call.Target = r.GetStagingTargetPath()
		}
		return answer(ctx, p, req, forward)
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

func (p *driverProxy) couldDefer(req *csi.NodeStageVolumeRequest) bool {
	has, w := p.driver.LastCapabilities(), decision.StageRequest(p.driver.Name, p.cfg.DefaultFSType, req)
	rules := p.front.rules.Load()
	return has == nil || has.Native || rules.Policy.CouldDefer(w.Input) // nil: it has not told yet
}

// lockTimeout bounds how long a call waits for another one on the same volume. A driver that
// hangs must not queue kubelet's repeated calls behind it.
const lockTimeout = 5 * time.Second

// withLock runs a call that changes a volume under the volume's lock. The driver itself
// refuses a request without a volume or path.
func (p *driverProxy) withLock(
	ctx context.Context, volumeID, path string, forward forwardFunc, run func(staging.VolumeID) ([]byte, error),
) ([]byte, error) {
	if volumeID == "" || path == "" {
		return forward(ctx)
	}
	id := staging.VolumeID{Driver: p.driver.Name, ID: volumeID}
	waiting, cancel := context.WithTimeout(ctx, lockTimeout)
	unlock, err := p.front.locks.Lock(waiting, id)
	cancel()
	if err != nil {
		return nil, callUnderWay(id)
	}
	defer unlock()
	return run(id)
}

// find looks up the deferred volume of a stats, health or expand call, and names it for the
// call's log: by its target, else by its id, for kubelet may name the staging path instead. It
// returns nil if there is none. While a volume is being removed a sandbox may still have its device.
func (p *driverProxy) find(ctx context.Context, volumeID, path, stagingPath string) (*deferral.Status, error) {
	_, found, err := p.front.find(path)
	if err != nil {
		return nil, err
	}
	if found == nil || decision.CheckSameVolume(found.Volume, p.driver.Name, volumeID) != nil {
		found = p.findStaged(volumeID, func(at string) bool { return at != "" && (at == path || at == stagingPath) })
	}
	if found != nil {
		annotate(ctx, found)
	}
	return found, nil
}

// annotate names a deferred volume for the call's log, metrics and span.
func annotate(ctx context.Context, found *deferral.Status) {
	call := telemetry.CallFrom(ctx)
	call.Volume, call.Target, call.Handler = string(found.Key), found.Target, found.Handler
	if of := found.Origin; of != nil {
		call.Rule, call.Pod = of.Rule, podName(of.PodNamespace, of.PodName)
	}
}

// annotateVerdict does so for a stage or publish, which may have failed before it was decided.
func annotateVerdict(ctx context.Context, w *decision.VolumeRequest, verdict *policy.Verdict) {
	call := telemetry.CallFrom(ctx)
	call.Rule, call.Handler, call.Pod = verdict.Rule, verdict.Handler, podName(w.PodNamespace, w.PodName)
}

func podName(namespace, name string) string {
	if name == "" {
		return ""
	}
	return namespace + "/" + name
}

// findStaged looks up a deferred volume by its id and staging path; one that is not being removed comes first.
func (p *driverProxy) findStaged(volumeID string, is func(stagingPath string) bool) (found *deferral.Status) {
	for _, status := range p.volumes.OfOrigin(p.driver.Name, volumeID) {
		if is(status.Origin.Staging) && (found == nil || !status.Removing) {
			found = &status
		}
	}
	return found
}

// isStagedAsDevice reports whether the driver has staged the volume as a device. Then it
// knows nothing of kubelet's paths, also while no pod has the volume.
func (p *driverProxy) isStagedAsDevice(volumeID, path string) bool {
	rec := p.records.Get(staging.VolumeID{Driver: p.driver.Name, ID: volumeID})
	return rec.StagedAsDevice() && !kubelet.IsRawBlock(path)
}

// checkBlockWay refuses a volume that the driver cannot give as a block device.
func (p *driverProxy) checkBlockWay(w *decision.VolumeRequest, verdict *policy.Verdict) error {
	if w.Inline {
		return decision.InlineAsDevice(w, verdict)
	}
	return p.stager.CheckRawBlock(verdict.Rule)
}

// recordRefusal ends a stage or a publish: an error is listed as a refusal and becomes one
// sentence, for kubelet shows it with the pod. Success removes the volume from the list.
func (p *driverProxy) recordRefusal(w *decision.VolumeRequest, verdict *policy.Verdict, err error) error {
	if err == nil {
		p.cfg.Refusals.ForgetTarget(w.Path)
		return nil
	}
	if status.Code(rpccode.Status(err)) == codes.Canceled {
		return err // kubelet went away, and nobody refused
	}
	key, failed := p.volumes.KeyOfTarget(w.Path)
	if failed != nil {
		key = volume.KeyOf(w.Path) // it lies elsewhere, and never will be on record
	}
	refused := refusal.Refusal{
		Key: key, Target: w.Path, Driver: p.driver.Name, VolumeID: refusal.Clip(w.VolumeID), FSType: refusal.Clip(w.FSType),
		AccessMode: w.AccessMode, Rule: verdict.Rule, Handler: verdict.Handler, Party: refusal.PartyOf(err),
		PodUID: w.PodUID, PodNamespace: w.PodNamespace, PodName: w.PodName, PVC: w.PVC,
	}
	err = refusal.Sentence(&refused, err)
	refused.Error = status.Convert(err).Message()
	p.cfg.Refusals.Add(refused)
	return err
}

// namingPod adds the pod on record to the error of a call for a deferred volume.
func namingPod(v *volume.Volume, err error) error {
	if err == nil || v == nil || v.Origin == nil || v.Origin.PodName == "" {
		return err
	}
	return refusal.Sentence(&refusal.Refusal{Target: v.Target, PodNamespace: v.Origin.PodNamespace, PodName: v.Origin.PodName}, err)
}
