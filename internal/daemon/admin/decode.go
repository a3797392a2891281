package admin

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // the codec that is wrapped
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/ground/rpccode"
)

// A request that cannot be decoded, such as one with text that is not UTF-8, is the
// caller's fault: InvalidArgument. gRPC itself answers Internal before any handler runs.
// So the codec keeps the error of a unary request, and the service returns it.

// ServerOption makes a server decode requests as the services of this package expect it.
func ServerOption() grpc.ServerOption {
	return grpc.ForceServerCodecV2(codec{encoding.GetCodecV2("proto")})
}

// decoding is a request, and the error of decoding it.
type decoding struct {
	request any
	err     error
}

type codec struct{ encoding.CodecV2 }

// Unmarshal decodes a message, and keeps the error of a decoding.
func (c codec) Unmarshal(data mem.BufferSlice, into any) error {
	if d, ok := into.(*decoding); ok {
		d.err = c.CodecV2.Unmarshal(data, d.request)
		return nil
	}
	return c.CodecV2.Unmarshal(data, into)
}

// checked returns a service description whose unary calls return decoding errors
// themselves, and convert errors to gRPC statuses before interceptors see them.
func checked(desc grpc.ServiceDesc) *grpc.ServiceDesc {
	methods := make([]grpc.MethodDesc, len(desc.Methods))
	for i, method := range desc.Methods {
		handle := method.Handler
		method.Handler = func(srv any, ctx context.Context, dec func(any) error, in grpc.UnaryServerInterceptor) (any, error) {
			return handle(srv, ctx, func(request any) error { return decode(dec, request) }, withStatus(in))
		}
		methods[i] = method
	}
	desc.Methods = methods
	return &desc
}

// withStatus converts the errors of the handler before the interceptor sees them.
func withStatus(in grpc.UnaryServerInterceptor) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
		answer := func(ctx context.Context, req any) (any, error) {
			reply, err := handle(ctx, req)
			return reply, rpccode.Status(err)
		}
		if in == nil {
			return answer(ctx, req)
		}
		return in(ctx, req, info, answer)
	}
}

func decode(dec func(any) error, request any) error {
	d := decoding{request: request}
	if err := dec(&d); err != nil {
		return err
	}
	if d.err != nil {
		return status.Errorf(codes.InvalidArgument, "the request cannot be decoded: %v", d.err)
	}
	return nil
}
