package admin

import (
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/runtime"
	"github.com/crust-proxy/crust-proxy/pkg/stats"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// StateOf is the name of a volume's state in metrics.
func (n *Node) StateOf(s deferral.Status) string {
	return strings.ToLower(strings.TrimPrefix(adminv1.VolumeState_name[int32(n.state(s))], "VOLUME_STATE_"))
}

func (n *Node) state(s deferral.Status) adminv1.VolumeState {
	switch {
	case s.Refused:
		return adminv1.VolumeState_VOLUME_STATE_REFUSED
	case s.OffRecord:
		return adminv1.VolumeState_VOLUME_STATE_HELD
	case s.Adopted:
		return adminv1.VolumeState_VOLUME_STATE_ADOPTED
	case s.Removing, s.Leaving:
		return adminv1.VolumeState_VOLUME_STATE_REMOVING
	case s.Problem != nil:
		return adminv1.VolumeState_VOLUME_STATE_DEGRADED
	}
	if _, bound := n.Sandboxes.Binding(s.Volume); bound {
		return adminv1.VolumeState_VOLUME_STATE_BOUND
	}
	return adminv1.VolumeState_VOLUME_STATE_PUBLISHED
}

func (n *Node) message(s deferral.Status) *adminv1.Volume {
	v := s.Volume
	out := &adminv1.Volume{
		Id: string(v.Key), TargetPath: v.Target, State: n.state(s), Driver: v.Driver, Handler: v.Handler,
		Device: v.Device.Path, DeviceId: v.Device.String(), FsType: v.FSType, MountFlags: v.MountFlags,
		ReadOnly: v.ReadOnly, SupplementalGroup: v.Group, SupplementalGroupChangePolicy: string(v.GroupPolicy),
		PodUid: v.PodUID, CreatedAt: Stamp(v.Created), GrowToBytes: v.GrowTo,
	}
	if v.GrowTo > 0 && !n.Broker.Abilities(v.Handler).GrowsAtMount {
		out.GrowWaits = refusal.GrowsWhen(v)
	}
	if v.Origin != nil {
		out.VolumeId, out.AccessMode, out.Rule, out.Way = v.Origin.VolumeID, v.Origin.AccessMode, v.Origin.Rule, v.Origin.Way
		out.PodNamespace, out.PodName, out.PvcName = v.Origin.PodNamespace, v.Origin.PodName, v.Origin.PVC
	}
	if v.Adopted || s.Refused {
		out.DeviceId = ""
	}
	if !s.Refused {
		out.Sandbox = n.sandbox(v)
	}
	known, ok := n.Sandboxes.Known(v)
	if ok && !known.At.IsZero() {
		out.Usage, out.UsageAt, out.Condition = usageMessages(known.Report), Stamp(known.At), conditionMessage(known.Report)
		if known.GroupIgnored {
			out.GroupProblem = runtime.GroupIgnored
		}
	}
	out.LastError, out.LastErrorAt = lastError(s, known, out.GetSandbox() != nil)
	n.showRefusal(s, out)
	if s.Held != nil {
		out.HeldBy, out.HeldSince, out.ReleasedByForce = s.Held.Processes, Stamp(s.Held.Since), s.Held.Forced
		if out.GetLastError() == "" {
			out.LastError, out.LastErrorAt = "its device is open in "+s.Held.Processes, Stamp(s.Held.Since)
		}
	}
	n.showFreeze(s, out)
	if known.Requests > 0 {
		out.StatsTook, out.StatsAt = durationpb.New(known.Took), Stamp(known.AskedAt)
		out.StatsRequests, out.StatsFailures = known.Requests, known.Failures
	}
	return out
}

// showFreeze shows what a snapshot of the volume holds that is made now. The driver cannot freeze the filesystem by
// a mount: there is none on the node.
func (n *Node) showFreeze(s deferral.Status, out *adminv1.Volume) {
	frozen, ok := n.frozen.of(s.Key)
	if ok {
		out.FrozenSince, out.FrozenUntil = Stamp(frozen.since), Stamp(frozen.until)
	}
	handler, err := n.Sandboxes.Handler(s.Volume)
	_, able := handler.(runtime.Freezer)
	switch sandbox := out.GetSandbox().GetId(); {
	case s.ReadOnly || s.Refused || s.OffRecord:
	case ok && sandbox != "" && frozen.sandbox == sandbox:
		out.Snapshots = "clean (frozen by the Admin API)"
	case err == nil && !able:
		out.Snapshots = "as after a crash (the handler " + s.Handler + " cannot freeze)"
	default:
		out.Snapshots = "as after a crash, unless frozen while its pod runs: crustctl freeze"
	}
}

// showRefusal shows which party refused a volume, or a repeated call for a volume on record.
func (n *Node) showRefusal(s deferral.Status, out *adminv1.Volume) {
	refused := n.refusal(s.Key)
	if refused == nil {
		return
	}
	out.RefusedBy, out.Refusals = string(refused.Party), refused.Count
	if out.GetLastError() == "" {
		out.LastError, out.LastErrorAt = refused.Error, Stamp(refused.Last)
	}
}

// lastError is what is wrong with the volume itself, or else the last error of its sandbox. That no sandbox has a
// volume is no error of it.
func lastError(s deferral.Status, known stats.Known, bound bool) (string, *timestamppb.Timestamp) {
	switch {
	case s.Problem != nil:
		return refusal.WithAdvice(s.Problem).Error(), Stamp(s.ProblemSince)
	case known.Err != nil && (bound || volume.KindOf(known.Err) != volume.NoSandbox):
		return known.Err.Error(), Stamp(known.ErrAt)
	case known.GrowErr != nil:
		return known.GrowErr.Error(), Stamp(known.GrowErrAt)
	}
	return "", nil
}

func (n *Node) sandbox(v *volume.Volume) *adminv1.Sandbox {
	binding, ok := n.Sandboxes.Binding(v)
	if !ok {
		return nil
	}
	return &adminv1.Sandbox{Id: binding.Sandbox, Runtime: binding.Runtime, BoundAt: Stamp(binding.Since)}
}

func usageMessages(report volume.Report) []*adminv1.VolumeUsage {
	return sys.Map(report.Usage, func(u volume.Usage) *adminv1.VolumeUsage {
		return &adminv1.VolumeUsage{Available: u.Available, Total: u.Total, Used: u.Used, Unit: adminv1.VolumeUsage_Unit(u.Unit)}
	})
}

func conditionMessage(report volume.Report) *adminv1.VolumeCondition {
	if report.Condition == nil {
		return nil
	}
	return &adminv1.VolumeCondition{Abnormal: report.Condition.Abnormal, Message: report.Condition.Message}
}

// Stamp converts a time; the zero time becomes nil.
func Stamp(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}
