package driver

import (
	"context"
	"path"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/rpccode"
)

// logCalls logs each call by its method, volume, code and time: never the
// request, which may hold secrets. It also is where classed errors become codes.
func (d *Driver) logCalls(ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	began := time.Now()
	reply, err := handle(ctx, req)
	err = rpccode.Status(err)
	fields := []zap.Field{
		zap.String("method", path.Base(info.FullMethod)), zap.Stringer("code", status.Code(err)), zap.Duration("took", time.Since(began)),
	}
	if named, ok := req.(interface{ GetVolumeId() string }); ok {
		fields = append(fields, zap.String("volume", named.GetVolumeId()))
	}
	if err != nil {
		d.log.Warn("call failed", append(fields, zap.Error(err))...)
		return nil, err
	}
	d.log.Debug("call", fields...)
	return reply, nil
}
