package csi

import (
	"cmp"
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// CSI had VolumeCondition up to 1.12, and kubelet reads it up to Kubernetes 1.36. Both
// numbers are reserved since, so newer kubelets ignore them.
const (
	volumeConditionCapability = csi.NodeServiceCapability_RPC_Type(4)
	volumeConditionField      = 2
)

// getVolumeStats asks the sandbox of a deferred volume. It takes no lock, so that it does not
// wait for a driver or another call that hangs.
func getVolumeStats(ctx context.Context, p *driverProxy, req *csi.NodeGetVolumeStatsRequest, forward forwardFunc) ([]byte, error) {
	found, err := p.find(ctx, req.GetVolumeId(), req.GetVolumePath(), req.GetStagingTargetPath())
	if err != nil {
		return nil, err
	}
	if found != nil {
		answer, err := p.cfg.Sandboxes.Stats(ctx, found.Volume)
		if err != nil {
			return nil, namingPod(found.Volume, err)
		}
		return proto.Marshal(statsReply(&answer.Report))
	}
	if p.isStagedAsDevice(req.GetVolumeId(), req.GetVolumePath()) {
		return nil, statsOfNoPod(req.GetVolumePath())
	}
	if has := p.driver.LastCapabilities(); has != nil && !has.Stats {
		// kubelet then has no stats of the volume, as without the front, and logs nothing. An
		// empty answer would mean zeros to it.
		telemetry.CallFrom(ctx).Expected = true
		return nil, noStats(p.driver.Name)
	}
	return forward(ctx)
}

func statsReply(report *volume.Report) *csi.NodeGetVolumeStatsResponse {
	reply := &csi.NodeGetVolumeStatsResponse{Usage: sys.Map(report.Usage, func(u volume.Usage) *csi.VolumeUsage {
		return &csi.VolumeUsage{Available: u.Available, Total: u.Total, Used: u.Used, Unit: csi.VolumeUsage_Unit(u.Unit)}
	})}
	condition := volume.Condition{Message: healthUnknown}
	if known := report.Condition; known != nil {
		condition = volume.Condition{Abnormal: known.Abnormal, Message: cmp.Or(known.Message, nothingAbnormal)}
	}
	raw := protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), protowire.EncodeBool(condition.Abnormal))
	raw = protowire.AppendString(protowire.AppendTag(raw, 2, protowire.BytesType), condition.Message)
	field := protowire.AppendTag(nil, volumeConditionField, protowire.BytesType)
	reply.ProtoReflect().SetUnknown(protowire.AppendBytes(field, raw))
	return reply
}
