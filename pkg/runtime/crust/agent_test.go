package crust

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"

	handlerv1 "github.com/crust-proxy/crust-proxy/proto/crust/handler/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/test/check/rpctest"
)

// agent is a fake of the node-wide agent, which does by the same files as the fake program.
type agent struct {
	handlerv1.UnimplementedHandlerServer
	path   string
	state  string
	stop   func()
	asked  atomic.Int64
	frozen atomic.Int64 // seconds
}

func startAgent(t testing.TB, path, state string) *agent {
	t.Helper()
	a := &agent{path: path, state: state}
	a.start(t)
	return a
}

func (a *agent) start(t testing.TB) {
	t.Helper()
	_ = os.Remove(a.path)
	a.stop = serve(t, a.path, a, grpc.UnaryInterceptor(a.intercept))
}

// serve serves a socket for the time of the test.
func serve(t testing.TB, path string, handler handlerv1.HandlerServer, options ...grpc.ServerOption) (stop func()) {
	t.Helper()
	server := grpc.NewServer(options...)
	handlerv1.RegisterHandlerServer(server, handler)
	return rpctest.Serve(t, path, server)
}

func (a *agent) intercept(ctx context.Context, in any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	a.asked.Add(1)
	named, ok := in.(interface{ GetTargetPath() string })
	if !ok {
		return nil, status.Error(codes.InvalidArgument, "no target")
	}
	_, rest, _ := strings.Cut(named.GetTargetPath(), "/pods/")
	pod, _, _ := strings.Cut(rest, "/")
	mode, err := os.ReadFile(filepath.Join(a.state, pod))
	if err != nil {
		return nil, status.Error(codes.NotFound, "no sandbox has it")
	}
	switch string(mode) {
	case "hang", "end":
		if string(mode) == "end" {
			go a.stop()
		}
		<-ctx.Done()
		return nil, ctx.Err()
	case "refuse":
		return nil, status.Error(codes.Internal, "I had rather not\x1b[2J\nreally")
	case "babble":
		// A field that should be a message, as a number.
		broken := &handlerv1.GetVolumeStatsResponse{}
		broken.ProtoReflect().SetUnknown(protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.BytesType), 99))
		return broken, nil
	}
	return next(ctx, in)
}

func (a *agent) GetVolumeStats(context.Context, *handlerv1.GetVolumeStatsRequest) (*handlerv1.GetVolumeStatsResponse, error) {
	return &handlerv1.GetVolumeStatsResponse{Usage: []*runtimev1.VolumeUsage{
		{Available: 7, Total: 10, Used: 3, Unit: runtimev1.VolumeUsage_BYTES},
		{Available: 90, Total: 100, Used: 10, Unit: runtimev1.VolumeUsage_INODES},
	}, VolumeCondition: &runtimev1.VolumeCondition{Message: "fine", Reason: "Fine"}}, nil
}

func (a *agent) ResizeVolume(_ context.Context, in *handlerv1.ResizeVolumeRequest) (*handlerv1.ResizeVolumeResponse, error) {
	return &handlerv1.ResizeVolumeResponse{CapacityBytes: in.GetCapacityRange().GetRequiredBytes()}, nil
}

func (a *agent) FreezeVolume(_ context.Context, in *handlerv1.FreezeVolumeRequest) (*handlerv1.FreezeVolumeResponse, error) {
	a.frozen.Store(in.GetTimeout().GetSeconds())
	return &handlerv1.FreezeVolumeResponse{}, nil
}

func (a *agent) ThawVolume(context.Context, *handlerv1.ThawVolumeRequest) (*handlerv1.ThawVolumeResponse, error) {
	a.frozen.Store(0)
	return &handlerv1.ThawVolumeResponse{}, nil
}
