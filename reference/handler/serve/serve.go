// Package serve serves the operations on volumes over the Handler API.
package serve

import (
	"cmp"
	"context"
	"errors"
	"path"
	"sync"

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

// A device that hangs keeps a call, and a thread with it, long after its caller has gone. gRPC
// stops reading a connection, the only one of its caller, that has maxStreams calls under way.
const (
	maxStreams = 1024
	maxCalls   = 4                  // about one volume
	manyCalls  = maxStreams * 3 / 4 // about all volumes; then one about each volume. No stream is reserved for thaws
)

// New creates a server of the volumes.
func New(volumes handler.Volumes) *grpc.Server {
	underWay := calls{count: make(map[string]int)}
	served := grpc.NewServer(grpc.UnaryInterceptor(underWay.answer), grpc.MaxRecvMsgSize(maxRequest), grpc.MaxConcurrentStreams(maxStreams),
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
		unit := runtimev1.VolumeUsage_Unit(runtimev1.VolumeUsage_Unit_value[u.Unit])
		out.Usage = append(out.Usage, &runtimev1.VolumeUsage{Available: u.Available, Total: u.Total, Used: u.Used, Unit: unit})
	}
	if c := reply.Condition; c != nil {
		out.VolumeCondition = &runtimev1.VolumeCondition{Abnormal: c.Abnormal, Message: c.Message, Reason: c.Reason}
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

// FreezeVolume blocks all writes. If writing the dirty data took longer than the caller waited,
// it thaws the volume again: the caller, who saw a failure, would not.
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

// ThawVolume ends a freeze.
func (s *server) ThawVolume(_ context.Context, req *handlerv1.ThawVolumeRequest) (*handlerv1.ThawVolumeResponse, error) {
	return &handlerv1.ThawVolumeResponse{}, s.volumes.Thaw(req.GetTargetPath())
}

// calls counts the calls in flight for each target.
type calls struct {
	mu    sync.Mutex
	count map[string]int
	all   int
}

// enter counts a call, unless its volume has too many. The caller must call leave.
func (c *calls) enter(target string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if n := c.count[target]; n >= maxCalls || n > 0 && c.all >= manyCalls {
		return false
	}
	c.count[target]++
	c.all++
	return true
}

func (c *calls) leave(target string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all--
	if c.count[target]--; c.count[target] == 0 {
		delete(c.count, target)
	}
}

// answer is an interceptor. It checks the target, bounds the calls for each volume, and maps
// errors to codes. A thaw is never refused: the other calls may wait for it.
func (c *calls) answer(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	of, named := req.(interface{ GetTargetPath() string })
	if !named {
		return nil, status.Errorf(codes.Unimplemented, "%s names no volume", info.FullMethod)
	}
	target := of.GetTargetPath()
	if !path.IsAbs(target) {
		return nil, status.Errorf(codes.InvalidArgument, "target_path: %q is not an absolute path", target)
	}
	if info.FullMethod != handlerv1.Handler_ThawVolume_FullMethodName {
		if !c.enter(target) {
			return nil, status.Errorf(codes.DeadlineExceeded, "volume %s: calls about it have not ended: its filesystem or its device hangs", target)
		}
		defer c.leave(target)
	}
	reply, err := next(ctx, req)
	return reply, toStatus(err)
}

// toStatus maps an error to the code that corresponds to the program's exit status.
func toStatus(err error) error {
	if _, is := status.FromError(err); is {
		return err // or nil
	}
	code := map[int]codes.Code{
		abi.ExitUsage: codes.InvalidArgument, abi.ExitNoSandbox: codes.NotFound,
		abi.ExitUnsupported: codes.Unimplemented, abi.ExitOutOfRange: codes.OutOfRange,
		abi.ExitWrongState: codes.FailedPrecondition,
	}[handler.ExitStatus(err)]
	return status.Error(cmp.Or(code, codes.Internal), err.Error())
}
