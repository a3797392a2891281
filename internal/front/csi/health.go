package csi

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
	"github.com/crust-proxy/crust-proxy/internal/front/kubelet"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

const (
	// healthTimeout bounds the calls to the sandbox and the driver of a deferred volume, and a driver's capabilities.
	healthTimeout = 2 * time.Second
	// driverHealthTimeout bounds a call that is the driver's alone. After its error kubelet keeps the former health.
	driverHealthTimeout = 5 * time.Second
	// failsFor is how long after its last failure a driver counts as failing: it may always fail for one volume only.
	failsFor = 5 * time.Minute
	// maxHealthReply bounds a driver's answer. What kubelet accepts has 20 KiB.
	maxHealthReply = 256 << 10
)

// getVolumeHealth answers for a deferred volume from its sandbox and its driver. It returns no error of
// either, after which kubelet would keep the former health. Like stats it takes no lock.
func getVolumeHealth(ctx context.Context, p *driverProxy, req *csi.NodeGetVolumeHealthRequest, _ forwardFunc) ([]byte, error) {
	id := req.GetVolumeId()
	if id == "" {
		return nil, status.Error(codes.InvalidArgument, "volume_id is missing")
	}
	found, err := p.find(ctx, id, req.GetVolumePublishPath(), req.GetStagingTargetPath())
	if err != nil {
		return nil, err
	}
	pathless := req.GetVolumePublishPath() == "" && req.GetStagingTargetPath() == "" // the request need not have a path
	if pathless {
		found = p.findStaged(id, func(string) bool { return true })
	}
	if found != nil && (!pathless || !found.Removing) {
		annotate(ctx, found)
		return deferredHealth(ctx, p, id, found.Volume)
	}
	if rec := p.records.Get(staging.VolumeID{Driver: p.driver.Name, ID: id}); rec.StagedAsDevice() && !kubelet.IsRawBlock(req.GetVolumePublishPath()) {
		return healthReply(id, deviceHealth(ctx, p, &csi.NodeGetVolumeHealthRequest{VolumeId: id, StagingTargetPath: rec.Stage.Private}))
	}
	telemetry.CallFrom(ctx).Expected = p.driver.Silent() // the call that took too long was logged
	entries, err := driverHealth(ctx, p, driverHealthTimeout, req)
	if err != nil {
		return nil, err
	}
	return healthReply(id, entries)
}

// getStorageHealth forwards the call. kubelet waits for it before it asks for the next health of volumes.
func getStorageHealth(ctx context.Context, p *driverProxy, _ []byte, forward forwardFunc) ([]byte, error) {
	return staging.Within(ctx, p.driver, driverHealthTimeout, forward)
}

// deferredHealth asks the sandbox and the driver at once. The driver is asked by the paths that it was given, and without
// any if they are not known: it may have used the Runtime API, or the record is lost.
func deferredHealth(ctx context.Context, p *driverProxy, id string, v *volume.Volume) ([]byte, error) {
	ask := &csi.NodeGetVolumeHealthRequest{VolumeId: id}
	if of := v.Origin; of != nil {
		ask.VolumePublishPath, ask.StagingTargetPath = cmp.Or(of.Private, v.Target), cmp.Or(of.PrivateStaging, of.Staging)
	}
	known := make(chan []*healthEntry, 1)
	go func() { known <- deviceHealth(ctx, p, ask) }()
	return healthReply(id, append(sandboxHealth(ctx, p.cfg.Sandboxes, v), <-known...))
}

// deviceHealth returns what the driver itself knows of a deferred volume, such as a thin pool that is full. A driver
// that fails or hangs costs no more than its own entries.
func deviceHealth(ctx context.Context, p *driverProxy, ask *csi.NodeGetVolumeHealthRequest) []*healthEntry {
	entries, err := driverHealth(ctx, p, p.front.healthTimeout, ask)
	logHealth(p, ask.GetVolumeId(), err)
	return entries
}

// logHealth warns when the driver begins to fail, and when it answers again. kubelet asks once per volume and minute.
func logHealth(p *driverProxy, volumeID string, err error) {
	now, last := time.Now(), p.failed.Load()
	failing := last != nil && now.Sub(*last) < failsFor
	switch level := zap.WarnLevel; {
	case err != nil:
		if p.failed.Store(&now); failing {
			level = zap.DebugLevel
		}
		p.log.Log(level, "the driver does not report health or capabilities", zap.String(telemetry.FieldCSIVolume, refusal.Clip(volumeID)), zap.Error(err))
	case last != nil && !failing && p.failed.CompareAndSwap(last, nil):
		p.log.Warn("the driver reports health again")
	}
}

// driverHealth asks the driver. One that does not implement it knows of nothing that is wrong.
func driverHealth(ctx context.Context, p *driverProxy, within time.Duration, ask *csi.NodeGetVolumeHealthRequest) ([]*healthEntry, error) {
	if has := p.driver.LastCapabilities(); has != nil && !has.Health {
		return nil, nil
	}
	reply, err := staging.Within(ctx, p.driver, within, func(ctx context.Context) (*csi.NodeGetVolumeHealthResponse, error) {
		return p.driver.Node.NodeGetVolumeHealth(ctx, ask, grpc.MaxCallRecvMsgSize(maxHealthReply))
	})
	if status.Code(err) == codes.Unimplemented {
		return nil, nil
	}
	return reply.GetVolumeHealth().GetHealthStatuses(), p.driver.Error("asked for the health of a volume", err, nil)
}

// sandboxHealth returns what is wrong with a deferred volume, or nil if nothing is known to be.
func sandboxHealth(ctx context.Context, sandboxes Sandboxes, v *volume.Volume) []*healthEntry {
	ctx, cancel := context.WithTimeout(ctx, healthTimeout)
	defer cancel()
	answer, err := sandboxes.Stats(ctx, v)
	if err != nil {
		telemetry.CallFrom(ctx).Expected = true
		return healthOfError(sandboxes, v, err)
	}
	condition := answer.Condition
	if condition == nil || !condition.Abnormal {
		return nil
	}
	kind := csi.VolumeHealthErrorType_DEGRADED
	if condition.Reason == abi.ReasonShutDown {
		kind = csi.VolumeHealthErrorType_INACCESSIBLE
	}
	return []*healthEntry{{Status: kind, Reason: condition.Reason, Message: condition.Message}}
}

// The reasons that the front gives itself.
const (
	reasonAbnormal  = "Abnormal"
	reasonNoSandbox = "NoSandbox"
	reasonHangs     = "SandboxDoesNotAnswer"
	reasonUsage     = "UsageImpossible"
	reasonFails     = "SandboxFails"
)

// healthOfError returns the health of a volume whose sandbox does not answer. It is never
// INACCESSIBLE, because the node has the device.
func healthOfError(sandboxes Sandboxes, v *volume.Volume, err error) []*healthEntry {
	reason := reasonFails
	switch volume.KindOf(err) {
	case volume.Unsupported, volume.Exhausted, volume.Busy, volume.Canceled:
		return nil // nobody can tell, or not now
	case volume.NoSandbox:
		if known, _ := sandboxes.Known(v); !known.HadSandbox() {
			return nil // no sandbox has mounted it yet
		}
		reason = reasonNoSandbox
	case volume.Timeout:
		reason = reasonHangs
	case volume.Absurd, volume.Malformed:
		reason = reasonUsage
	default:
	}
	return []*healthEntry{{Status: csi.VolumeHealthErrorType_DEGRADED, Reason: reason, Message: err.Error()}}
}

type healthEntry = csi.VolumeHealth_VolumeHealthEntry

// What the Kubernetes API accepts of one volume in the status of a pod. Because of a single entry that breaks a
// rule it refuses the whole status, and the pod can never end. kubelet does not check.
const (
	maxHealthEntries = 16
	maxHealthReason  = 256
	maxHealthMessage = 1024
)

var notInReason = sys.LazyRegexp(`[^A-Za-z0-9_,:]`)

func healthReply(id string, entries []*healthEntry) ([]byte, error) {
	health := &csi.VolumeHealth{VolumeId: id, HealthStatuses: acceptable(entries)}
	return proto.Marshal(&csi.NodeGetVolumeHealthResponse{VolumeHealth: health})
}

// acceptable returns entries as the Kubernetes API accepts them: one per status and reason, which has the messages of
// all, and of too many the worst. kubelet ignores a status that it does not know, as CSI wants, so it is kept.
func acceptable(entries []*healthEntry) (out []*healthEntry) {
	first := make(map[string]*healthEntry)
	for _, entry := range entries {
		entry = acceptableEntry(entry)
		is := entry.GetStatus().String() + " " + entry.GetReason()
		if same := first[is]; same == nil {
			first[is] = entry
			out = append(out, entry)
		} else if !strings.Contains(same.GetMessage(), entry.GetMessage()) {
			same.Message = clipMessage(strings.TrimPrefix(same.GetMessage()+"; "+entry.GetMessage(), "; "))
		}
	}
	if len(out) > maxHealthEntries {
		slices.SortStableFunc(out, func(a, b *healthEntry) int { return cmp.Compare(severity(b), severity(a)) })
		out = out[:maxHealthEntries]
	}
	return out
}

// acceptableEntry changes what is wrong in a reason, and then repeats it in the message.
func acceptableEntry(entry *healthEntry) *healthEntry {
	out, said := proto.CloneOf(entry), entry.GetReason()
	clean := strings.TrimLeft(notInReason().ReplaceAllString(said, "_"), "0123456789_,:")
	clean = strings.TrimRight(clean[:min(len(clean), maxHealthReason)], ",:")
	if clean != said {
		out.Message = strings.TrimSuffix(sys.Clip(said)+": "+entry.GetMessage(), ": ")
	}
	out.Reason, out.Message = cmp.Or(clean, reasonAbnormal), clipMessage(out.GetMessage())
	return out
}

func clipMessage(message string) string {
	return sys.ClipTo(strings.ToValidUTF8(message, "?"), maxHealthMessage-len("..."))
}

// severity is the status, if it is known: CSI numbers them from the mildest to the worst.
func severity(entry *healthEntry) csi.VolumeHealthErrorType {
	if entry.GetStatus() > csi.VolumeHealthErrorType_DATA_LOSS {
		return csi.VolumeHealthErrorType_UNKNOWN_VOLUME_HEALTH_TYPE
	}
	return entry.GetStatus()
}
