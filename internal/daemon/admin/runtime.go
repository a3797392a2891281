package admin

import (
	"context"
	"fmt"
	"strings"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
)

// RuntimeServer is the Runtime API.
type RuntimeServer struct {
	runtimev1.UnimplementedRuntimeServer
	Node *Node
}

// RuntimeStageVolume defers a volume.
func (s *RuntimeServer) RuntimeStageVolume(
	ctx context.Context, req *runtimev1.RuntimeStageVolumeRequest,
) (*runtimev1.RuntimeStageVolumeResponse, error) {
	call := telemetry.CallFrom(ctx)
	call.Target = req.GetVolumeTargetPath()
	before, _ := s.Node.byTarget(req.GetVolumeTargetPath(), s.Node.byKey)
	v, err := s.Node.Broker.Defer(ctx, instructionOf(req))
	note(call, v)
	call.Repeated = err == nil && v == before.Volume // a new or changed volume is another object
	return &runtimev1.RuntimeStageVolumeResponse{}, refusal.WithAdvice(err)
}

// note records the call's volume for log and metrics.
func note(call *telemetry.Call, v *volume.Volume) {
	if v == nil {
		return
	}
	call.Volume, call.Target, call.Driver, call.Handler = string(v.Key), v.Target, v.Driver, v.Handler
	if of := v.Origin; of != nil {
		call.CSIVolume, call.Rule, call.Pod = refusal.Clip(of.VolumeID), of.Rule, strings.TrimPrefix(of.PodNamespace+"/"+of.PodName, "/")
	}
}

// noteSize records the size of a growth for the volume's history.
func noteSize(ctx context.Context, size int64, later bool) {
	call := telemetry.CallFrom(ctx)
	if call.Detail = fmt.Sprintf("to %d bytes", size); later {
		call.Detail += " when a sandbox mounts it"
	}
}

func instructionOf(req *runtimev1.RuntimeStageVolumeRequest) volume.Instruction {
	policy, known := groupPolicies[req.GetVolumeSupplementalGroupChangePolicy()]
	if !known { // a number that the broker refuses
		policy = volume.GroupPolicy(req.GetVolumeSupplementalGroupChangePolicy().String())
	}
	return volume.Instruction{
		Type: volumeTypes[req.GetVolumeType().GetType()], Target: req.GetVolumeTargetPath(), Backing: req.GetVolumeBackingPath(),
		FSType: req.GetFsType(), MountFlags: req.GetMountFlags(), Group: req.GetVolumeSupplementalGroup(), GroupPolicy: policy,
		Format: volume.FormatDriver, KeepSize: true,
	}
}

var volumeTypes = map[runtimev1.VolumeType_Type]volume.Type{
	runtimev1.VolumeType_BLOCK:   volume.Block,
	runtimev1.VolumeType_NETWORK: volume.Network,
}

var groupPolicies = map[runtimev1.VolumeSupplementalGroupChangePolicy]volume.GroupPolicy{
	runtimev1.VolumeSupplementalGroupChangePolicy_UNKNOWN:          volume.GroupPolicyUnset,
	runtimev1.VolumeSupplementalGroupChangePolicy_ALWAYS:           volume.GroupAlways,
	runtimev1.VolumeSupplementalGroupChangePolicy_ON_ROOT_MISMATCH: volume.GroupOnMismatch,
}

// RuntimeUnstageVolume releases a volume.
func (s *RuntimeServer) RuntimeUnstageVolume(
	ctx context.Context, req *runtimev1.RuntimeUnstageVolumeRequest,
) (*runtimev1.RuntimeUnstageVolumeResponse, error) {
	call := telemetry.CallFrom(ctx)
	call.Target = req.GetVolumeTargetPath()
	v, err := s.Node.Broker.Release(ctx, req.GetVolumeTargetPath())
	note(call, v)
	return &runtimev1.RuntimeUnstageVolumeResponse{}, refusal.WithAdvice(err)
}

// RuntimeGetVolumeStats asks the sandbox.
func (s *RuntimeServer) RuntimeGetVolumeStats(
	ctx context.Context, req *runtimev1.RuntimeGetVolumeStatsRequest,
) (*runtimev1.RuntimeGetVolumeStatsResponse, error) {
	v, err := s.find(ctx, req.GetVolumeTargetPath())
	if err != nil {
		return nil, err
	}
	answer, err := s.Node.Sandboxes.Stats(ctx, v)
	if err != nil {
		return nil, err
	}
	return runtimeStats(answer.Report), nil
}

func (s *RuntimeServer) find(ctx context.Context, path string) (*volume.Volume, error) {
	call := telemetry.CallFrom(ctx)
	call.Target = path
	found, err := s.Node.byTarget(path, s.Node.byKey)
	note(call, found.Volume)
	return found.Volume, err
}

func runtimeStats(report volume.Report) *runtimev1.RuntimeGetVolumeStatsResponse {
	out := &runtimev1.RuntimeGetVolumeStatsResponse{Usage: sys.Map(report.Usage, func(u volume.Usage) *runtimev1.VolumeUsage {
		return &runtimev1.VolumeUsage{Available: u.Available, Total: u.Total, Used: u.Used, Unit: runtimev1.VolumeUsage_Unit(u.Unit)}
	})}
	if c := report.Condition; c != nil {
		out.VolumeCondition = &runtimev1.VolumeCondition{Abnormal: c.Abnormal, Message: c.Message, Reason: c.Reason}
	}
	return out
}

// RuntimeExpandVolume asks the sandbox to grow the filesystem.
func (s *RuntimeServer) RuntimeExpandVolume(
	ctx context.Context, req *runtimev1.RuntimeExpandVolumeRequest,
) (*runtimev1.RuntimeExpandVolumeResponse, error) {
	v, err := s.find(ctx, req.GetVolumeTargetPath())
	if err != nil {
		return nil, err
	}
	size, later, err := s.Node.expand(ctx, v, volume.Range{
		Required: req.GetCapacityRange().GetRequiredBytes(), Limit: req.GetCapacityRange().GetLimitBytes(),
	})
	noteSize(ctx, size, later)
	return &runtimev1.RuntimeExpandVolumeResponse{CapacityBytes: size}, err
}
