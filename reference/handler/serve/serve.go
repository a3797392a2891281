// Package serve serves what can be asked about volumes over the Handler API.
package serve

import (
	"context"
	"errors"
	"path"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	handlerv1 "github.com/crust-proxy/crust-proxy/proto/crust/handler/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/reference/handler"
)

// maxRequest bounds a request, and is the flow-control window: to estimate one, gRPC
// pings at nearly every request.
const maxRequest = 64 << 10

// New gives a server of the volumes.
func New(volumes handler.Volumes) *grpc.Server {
	served := grpc.NewServer(grpc.UnaryInterceptor(answer), grpc.MaxRecvMsgSize(maxRequest), grpc.MaxConcurrentStreams(1024),
		grpc.InitialWindowSize(maxRequest), grpc.InitialConnWindowSize(maxRequest))
	handlerv1.RegisterHandlerServer(served, &server{volumes: volumes})
	return served
}

// server serves the volumes over gRPC.
type server struct {
	handlerv1.UnimplementedHandlerServer
	volumes handler.Volumes
}

// GetVolumeStats measures the filesystem.
func (s *server) GetVolumeStats(_ context.Context, req *handlerv1.GetVolumeStatsRequest) (*handlerv1.GetVolumeStatsResponse, error) {
	reply, sandbox, err := s.volumes.Stats(req.GetTargetPath())
	if err != nil {
		return nil, err
	}
	out := &handlerv1.GetVolumeStatsResponse{SandboxId: sandbox}
	for _, u := range reply.Usage {
		unit := runtimev1.VolumeUsage_BYTES
		if u.Unit == abi.UnitInodes {
			unit = runtimev1.VolumeUsage_INODES
		}
		out.Usage = append(out.Usage, &runtimev1.VolumeUsage{Available: u.Available, Total: u.Total, Used: u.Used, Unit: unit})
	}
	out.VolumeCondition = &runtimev1.VolumeCondition{
		Abnormal: reply.Condition.Abnormal, Message: reply.Condition.Message, Reason: reply.Condition.Reason,
	}
	return out, nil
}

// ResizeVolume grows the filesystem to its device.
func (s *server) ResizeVolume(_ context.Context, req *handlerv1.ResizeVolumeRequest) (*handlerv1.ResizeVolumeResponse, error) {
	least, most := req.GetCapacityRange().GetRequiredBytes(), req.GetCapacityRange().GetLimitBytes()
	if least < 0 || most < 0 {
		return nil, status.Error(codes.InvalidArgument, "capacity_range: a size is negative")
	}
	size, err := s.volumes.Resize(req.GetTargetPath(), least, most)
	if err != nil {
		return nil, err
	}
	return &handlerv1.ResizeVolumeResponse{CapacityBytes: size}, nil
}

// FreezeVolume holds all writes. To write what is dirty can take longer than the caller
// waits, who then was told of a failure: nobody would thaw the volume.
func (s *server) FreezeVolume(ctx context.Context, req *handlerv1.FreezeVolumeRequest) (*handlerv1.FreezeVolumeResponse, error) {
	if err := req.GetTimeout().CheckValid(); err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "timeout: %v", err)
	}
	err := s.volumes.Freeze(req.GetTargetPath(), req.GetTimeout().AsDuration())
	if err == nil && ctx.Err() != nil {
		err = errors.Join(ctx.Err(), s.volumes.Thaw(req.GetTargetPath()))
	}
	return &handlerv1.FreezeVolumeResponse{}, err
}

// ThawVolume lets writes go on.
func (s *server) ThawVolume(_ context.Context, req *handlerv1.ThawVolumeRequest) (*handlerv1.ThawVolumeResponse, error) {
	return &handlerv1.ThawVolumeResponse{}, s.volumes.Thaw(req.GetTargetPath())
}

// answer checks what every call names, and gives errors their codes.
func answer(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	if of, ok := req.(interface{ GetTargetPath() string }); ok && !path.IsAbs(of.GetTargetPath()) {
		return nil, status.Errorf(codes.InvalidArgument, "target_path: %q is not an absolute path", of.GetTargetPath())
	}
	reply, err := next(ctx, req)
	return reply, toStatus(err)
}

// toStatus says the same by a code as the program does by its exit status.
func toStatus(err error) error {
	if _, is := status.FromError(err); is {
		return err // or nil
	}
	code := map[int]codes.Code{
		abi.ExitUsage: codes.InvalidArgument, abi.ExitNoSandbox: codes.NotFound,
		abi.ExitUnsupported: codes.Unimplemented, abi.ExitOutOfRange: codes.OutOfRange,
		abi.ExitWrongState: codes.FailedPrecondition,
	}
	is, known := code[handler.ExitStatus(err)]
	if !known {
		is = codes.Internal
	}
	return status.Error(is, err.Error())
}
