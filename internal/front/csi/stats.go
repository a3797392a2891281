package csi

import (
	"cmp"
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// annotateCall names the volume for the log of the call.
func annotateCall(ctx context.Context, found *deferral.Status) {
	call := telemetry.CallFrom(ctx)
	call.Volume, call.Target, call.Handler = string(found.Key), found.Target, found.Handler
}

func statsReply(report *volume.Report) *csi.NodeGetVolumeStatsResponse {
	reply := &csi.NodeGetVolumeStatsResponse{}
	for _, usage := range report.Usage {
		reply.Usage = append(reply.Usage, &csi.VolumeUsage{
			Available: usage.Available, Total: usage.Total, Used: usage.Used, Unit: csi.VolumeUsage_Unit(usage.Unit),
		})
	}
	condition := volume.Condition{Message: healthUnknown}
	if said := report.Condition; said != nil {
		condition = volume.Condition{Abnormal: said.Abnormal, Message: cmp.Or(said.Message, nothingAbnormal)}
	}
	setCondition(reply, condition)
	return reply
}
