package csi

import (
	"cmp"
	"context"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// healthTimeout bounds how long a sandbox is waited for: kubelet asks for the health of one
// volume after the other, and a sandbox that hangs must not hold up the others.
const healthTimeout = 2 * time.Second

// maxHealthMessage is what the Kubernetes API takes. A longer message would make it refuse
// the whole status of the pod.
const maxHealthMessage = 1024

// getVolumeHealth answers for a deferred volume from its sandbox. It returns no error of the
// sandbox, after which kubelet would keep the former health. Like stats it takes no lock.
func getVolumeHealth(ctx context.Context, p *driverProxy, req *csi.NodeGetVolumeHealthRequest, forward forwardFunc) ([]byte, error) {
	id := req.GetVolumeId()
	if id == "" {
		return nil, noVolumeID()
	}
	found, err := p.find(ctx, id, req.GetVolumePublishPath(), req.GetStagingTargetPath())
	if err != nil {
		return nil, err
	}
	if req.GetVolumePublishPath() == "" && req.GetStagingTargetPath() == "" { // the request need not have a path
		found = p.findStaged(id, func(string) bool { return true })
		if found != nil && found.Removing {
			found = nil
		}
	}
	if found != nil {
		annotate(ctx, found)
		return healthReply(id, sandboxHealth(ctx, p.cfg.Sandboxes, found.Volume))
	}
	if p.isStagedAsDevice(id, req.GetVolumePublishPath()) {
		return healthReply(id, nil)
	}
	if has := p.driver.LastCapabilities(); has != nil && !has.Health {
		return healthReply(id, nil)
	}
	answer, err := forward(ctx)
	if status.Code(err) == codes.Unimplemented {
		return healthReply(id, nil) // a driver that does not implement it knows of nothing that is wrong
	}
	return answer, err
}

func healthReply(id string, found *csi.VolumeHealth_VolumeHealthEntry) ([]byte, error) {
	health := &csi.VolumeHealth{VolumeId: id}
	if found != nil {
		health.HealthStatuses = append(health.HealthStatuses, found)
	}
	return proto.Marshal(&csi.NodeGetVolumeHealthResponse{VolumeHealth: health})
}

// sandboxHealth returns what is wrong with a deferred volume, or nil if nothing is known to be.
func sandboxHealth(ctx context.Context, sandboxes Sandboxes, v *volume.Volume) *csi.VolumeHealth_VolumeHealthEntry {
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
	return healthEntry(kind, cmp.Or(condition.Reason, reasonAbnormal), condition.Message)
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
func healthOfError(sandboxes Sandboxes, v *volume.Volume, err error) *csi.VolumeHealth_VolumeHealthEntry {
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
	return healthEntry(csi.VolumeHealthErrorType_DEGRADED, reason, err.Error())
}

func healthEntry(kind csi.VolumeHealthErrorType, reason, message string) *csi.VolumeHealth_VolumeHealthEntry {
	message = sys.ClipTo(strings.ToValidUTF8(message, "?"), maxHealthMessage-len("..."))
	return &csi.VolumeHealth_VolumeHealthEntry{Status: kind, Reason: reason, Message: message}
}
