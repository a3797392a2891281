package api

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// strict gives a service description whose unary calls answer a request that
// cannot be decoded, such as one with text that is not UTF-8, with
// InvalidArgument. gRPC itself would call that its own Internal error.
func strict(desc grpc.ServiceDesc) *grpc.ServiceDesc {
	methods := make([]grpc.MethodDesc, len(desc.Methods))
	for i, method := range desc.Methods {
		handle := method.Handler
		method.Handler = func(srv any, ctx context.Context, dec func(any) error, in grpc.UnaryServerInterceptor) (any, error) {
			return handle(srv, ctx, func(request any) error { return decodeStatus(dec(request)) }, in)
		}
		methods[i] = method
	}
	desc.Methods = methods
	return &desc
}

func decodeStatus(err error) error {
	if err == nil {
		return nil
	}
	return status.Errorf(codes.InvalidArgument, "the request cannot be decoded: %s", status.Convert(err).Message())
}
