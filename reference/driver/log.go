package driver

import (
	"context"
	"errors"
	"path"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/ground/rpccode"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// logCalls logs each call by its method, volume, code and duration, but never the request,
// which may hold secrets. It also turns classed errors into codes.
func (d *Driver) logCalls(ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	began := time.Now()
	reply, err := handle(ctx, req)
	err = coded(err)
	var fields []zap.Field
	if named, ok := req.(interface{ GetVolumeId() string }); ok {
		fields = append(fields, zap.String("volume", named.GetVolumeId()))
	}
	d.logCall(info.FullMethod, began, err, fields...)
	if err != nil {
		return nil, err
	}
	return reply, nil
}

// logStreams is logCalls for calls that stream their answer. It also counts them.
func (d *Driver) logStreams(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	began, end := time.Now(), d.metrics.begin(info.FullMethod)
	err := coded(handle(srv, stream))
	end(status.Code(err))
	d.logCall(info.FullMethod, began, err)
	return err
}

// coded turns an error into one with a code, which is RESOURCE_EXHAUSTED if a disk is full.
func coded(err error) error {
	if _, has := status.FromError(err); !has && volume.DiskKind(err) == volume.Exhausted {
		return status.Error(codes.ResourceExhausted, err.Error())
	}
	return rpccode.Status(err)
}

// afterUndo returns the error of a call whose steps were undone. If undoing failed too,
// something is left, and the code is ABORTED: the caller repeats the call, or undoes it.
func afterUndo(err, undo error) error {
	if undo == nil {
		return err
	}
	return status.Error(codes.Aborted, errors.Join(err, undo).Error())
}

func (d *Driver) logCall(method string, began time.Time, err error, fields ...zap.Field) {
	fields = append([]zap.Field{
		zap.String("method", path.Base(method)), zap.Stringer("code", status.Code(err)), zap.Duration("took", time.Since(began)),
	}, fields...)
	if err != nil {
		d.log.Warn("call failed", append(fields, zap.Error(err))...)
		return
	}
	d.log.Debug("call", fields...)
}
