package api

import (
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/stats"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// StateOf names where a volume stands, as metrics show it.
func (n *Node) StateOf(s deferral.Status) string {
	switch n.state(s) {
	case adminv1.VolumeState_VOLUME_STATE_ADOPTED:
		return "adopted"
	case adminv1.VolumeState_VOLUME_STATE_REMOVING:
		return "removing"
	case adminv1.VolumeState_VOLUME_STATE_DEGRADED:
		return "degraded"
	case adminv1.VolumeState_VOLUME_STATE_BOUND:
		return "bound"
	default:
		return "published"
	}
}

func (n *Node) state(s deferral.Status) adminv1.VolumeState {
	switch {
	case s.Adopted:
		return adminv1.VolumeState_VOLUME_STATE_ADOPTED
	case s.Removing:
		return adminv1.VolumeState_VOLUME_STATE_REMOVING
	case s.Problem != nil:
		return adminv1.VolumeState_VOLUME_STATE_DEGRADED
	}
	if _, bound := n.binding(s.Volume); bound {
		return adminv1.VolumeState_VOLUME_STATE_BOUND
	}
	return adminv1.VolumeState_VOLUME_STATE_PUBLISHED
}

// message shows a volume.
func (n *Node) message(s deferral.Status) *adminv1.Volume {
	v := s.Volume
	out := &adminv1.Volume{
		Id: string(v.Key), TargetPath: v.Target, State: n.state(s), Driver: v.Driver, Handler: v.Handler,
		Device: v.Device.Path, DeviceId: v.Device.String(), FsType: v.FSType, MountFlags: v.MountFlags,
		ReadOnly: v.ReadOnly, SupplementalGroup: v.Group, SupplementalGroupChangePolicy: string(v.GroupPolicy),
		PodUid: v.PodUID, CreatedAt: stamp(v.Created), Sandbox: n.sandbox(v), GrowToBytes: v.GrowTo,
	}
	if v.CSI != nil {
		out.VolumeId, out.AccessMode, out.Rule, out.Way = v.CSI.VolumeID, v.CSI.AccessMode, v.CSI.Rule, v.CSI.Way
	}
	if v.Adopted {
		out.DeviceId = ""
	}
	known, ok := n.Relay.Known(v.Key)
	if ok && !known.At.IsZero() {
		out.Usage, out.Condition, out.UsageAt = usageMessages(known.Report), conditionMessage(known.Report), stamp(known.At)
	}
	out.LastError, out.LastErrorAt = lastError(s, known)
	if known.Requests > 0 {
		out.StatsTook, out.StatsAt = durationpb.New(known.Took), stamp(known.AskedAt)
		out.StatsRequests, out.StatsFailures = known.Requests, known.Failures
	}
	return out
}

// lastError is what is wrong with the volume itself, or else what its sandbox
// said last.
func lastError(s deferral.Status, known stats.Known) (string, *timestamppb.Timestamp) {
	switch {
	case s.Problem != nil:
		return s.Problem.Error(), stamp(s.ProblemSince)
	case known.Err != nil:
		return known.Err.Error(), stamp(known.ErrAt)
	}
	return "", nil
}

func (n *Node) sandbox(v *deferral.Volume) *adminv1.Sandbox {
	binding, ok := n.binding(v)
	if !ok {
		return nil
	}
	return &adminv1.Sandbox{Id: binding.Sandbox, Runtime: binding.Runtime, BoundAt: stamp(binding.Since)}
}

func usageMessages(report deferral.Report) []*adminv1.VolumeUsage {
	out := make([]*adminv1.VolumeUsage, 0, len(report.Usage))
	for _, u := range report.Usage {
		out = append(out, &adminv1.VolumeUsage{
			Available: u.Available, Total: u.Total, Used: u.Used, Unit: adminv1.VolumeUsage_Unit(u.Unit),
		})
	}
	return out
}

func conditionMessage(report deferral.Report) *adminv1.VolumeCondition {
	if report.Condition == nil {
		return nil
	}
	return &adminv1.VolumeCondition{Abnormal: report.Condition.Abnormal, Message: report.Condition.Message}
}

func stamp(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}
