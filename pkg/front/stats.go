package front

import (
	"context"
	"fmt"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/observe"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// getVolumeStats asks the sandbox of a deferred volume. It takes no turn: a
// driver or another call that hangs does not keep numbers back.
func (n *node) getVolumeStats(ctx context.Context, raw []byte, forward forwardFunc) ([]byte, error) {
	req := &csi.NodeGetVolumeStatsRequest{}
	if err := proto.Unmarshal(raw, req); err != nil {
		return nil, unreadable(err)
	}
	found, deferred := n.find(req.GetVolumeId(), req.GetVolumePath(), req.GetStagingTargetPath())
	if !deferred {
		if has := n.lastCapabilities(); has != nil && !has.stats {
			return nil, status.Errorf(codes.Unimplemented, "driver %s tells no volume stats, and the volume is not deferred", n.name)
		}
		return forward(ctx, raw)
	}
	tell(ctx, &found)
	reply, err := n.sandboxStats(ctx, found.Volume)
	if err != nil {
		return nil, err
	}
	return proto.Marshal(reply)
}

// find gives the deferred volume that a stats or expand call means: by its
// target, else by its id, for kubelet may name the staging path instead.
func (n *node) find(volume, where, staging string) (deferral.Status, bool) {
	if found, ok, err := n.cfg.Volumes.Find(where); err == nil && ok && !found.Removing {
		return found, true
	}
	for _, status := range n.cfg.Volumes.OfCSI(n.name, volume) {
		if origin := status.CSI; !status.Removing && origin.Staging != "" && (origin.Staging == where || origin.Staging == staging) {
			return status, true
		}
	}
	return deferral.Status{}, false
}

// tell names the volume for the log of the call.
func tell(ctx context.Context, found *deferral.Status) {
	call := observe.CallFrom(ctx)
	call.Volume, call.Target, call.Handler = string(found.Key), found.Target, found.Handler
}

// sandboxStats is what the sandbox says; while there is none, what it said last,
// with a condition that says so.
func (n *node) sandboxStats(ctx context.Context, v *deferral.Volume) (*csi.NodeGetVolumeStatsResponse, error) {
	answer, err := n.cfg.Sandboxes.Stats(ctx, v)
	if err == nil {
		return statsReply(&answer.Report), nil
	}
	known, ok := n.cfg.Sandboxes.Known(v)
	if deferral.KindOf(err) != deferral.NoSandbox || !ok || known.At.IsZero() {
		return nil, err
	}
	reply := statsReply(&known.Report)
	reply.VolumeCondition = &csi.VolumeCondition{Abnormal: true, Message: fmt.Sprintf(
		"no sandbox has the volume now; the usage is that of %s", known.At.UTC().Format(time.RFC3339))}
	return reply, nil
}

func statsReply(report *deferral.Report) *csi.NodeGetVolumeStatsResponse {
	reply := &csi.NodeGetVolumeStatsResponse{
		VolumeCondition: &csi.VolumeCondition{Message: "the sandbox answers and reports nothing abnormal"},
	}
	for _, usage := range report.Usage {
		reply.Usage = append(reply.Usage, &csi.VolumeUsage{
			Available: usage.Available, Total: usage.Total, Used: usage.Used, Unit: csi.VolumeUsage_Unit(usage.Unit),
		})
	}
	if said := report.Condition; said != nil {
		reply.VolumeCondition.Abnormal = said.Abnormal
		if said.Message != "" {
			reply.VolumeCondition.Message = said.Message
		}
	}
	return reply
}
