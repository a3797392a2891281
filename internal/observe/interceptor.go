package observe

import (
	"context"
	"fmt"
	"runtime/debug"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	otelcodes "go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Peer tells who calls, for the log.
type Peer func(ctx context.Context) (uid uint32, pid int32, ok bool)

// Interceptors log, count, time and trace each call, and turn a panic into an
// error of that call alone.
type Interceptors struct {
	Log     *zap.Logger
	Metrics *Metrics
	// Tracer is nil where tracing is off.
	Tracer trace.Tracer
	Peer   Peer
	// Quiet are the methods whose success is logged at debug level: those that
	// are called all the time and change nothing.
	Quiet map[string]bool
}

// Options makes a server use them.
func (i *Interceptors) Options() []grpc.ServerOption {
	return []grpc.ServerOption{grpc.UnaryInterceptor(i.unary), grpc.StreamInterceptor(i.stream)}
}

func (i *Interceptors) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (reply any, err error) {
	call, start := &Call{}, time.Now()
	ctx, span := i.begin(withCall(ctx, call), info.FullMethod)
	defer func() {
		if cause := recover(); cause != nil {
			reply, err = nil, i.panicked(info.FullMethod, cause)
		}
		i.end(ctx, info.FullMethod, call, span, time.Since(start), err)
	}()
	return handle(ctx, req)
}

func (i *Interceptors) stream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) (err error) {
	call, start := &Call{}, time.Now()
	ctx, span := i.begin(withCall(stream.Context(), call), info.FullMethod)
	defer func() {
		if cause := recover(); cause != nil {
			err = i.panicked(info.FullMethod, cause)
		}
		i.end(ctx, info.FullMethod, call, span, time.Since(start), err)
	}()
	return handle(srv, &streamWithContext{ServerStream: stream, ctx: ctx})
}

// streamWithContext is a stream whose context knows its call.
type streamWithContext struct {
	grpc.ServerStream
	ctx context.Context //nolint:containedctx // this is how gRPC hands a stream its context
}

// Context is that of the call.
func (s *streamWithContext) Context() context.Context { return s.ctx }

// panicked keeps what panicked out of the reply: it may hold anything.
func (i *Interceptors) panicked(method string, cause any) error {
	i.Log.Error("panic in a call", zap.String(FieldMethod, method),
		zap.String("panic_type", fmt.Sprintf("%T", cause)), zap.ByteString(FieldStack, debug.Stack()))
	return status.Errorf(codes.Internal, "crust-proxy failed inside %s; its log has the details", method)
}

func (i *Interceptors) begin(ctx context.Context, method string) (context.Context, trace.Span) {
	if i.Tracer == nil {
		return ctx, nil
	}
	return i.Tracer.Start(ctx, strings.TrimPrefix(method, "/"), trace.WithSpanKind(trace.SpanKindServer))
}

func (i *Interceptors) end(ctx context.Context, method string, call *Call, span trace.Span, took time.Duration, err error) {
	code := status.Code(err)
	service, short := splitMethod(method)
	i.Metrics.called(callLabels{service, short, call.Driver, call.Handler, code.String()}, took)
	i.log(ctx, method, call, code, took, err)
	if span != nil {
		finish(span, call, code, err)
	}
}

func splitMethod(method string) (service, short string) {
	service, short, _ = strings.Cut(strings.TrimPrefix(method, "/"), "/")
	return service, short
}

func (i *Interceptors) log(ctx context.Context, method string, call *Call, code codes.Code, took time.Duration, err error) {
	level := zapcore.InfoLevel
	if err != nil {
		level = zapcore.WarnLevel
	} else if i.Quiet[method] {
		level = zapcore.DebugLevel
	}
	entry := i.Log.Check(level, "call")
	if entry == nil {
		return
	}
	fields := make([]zap.Field, 0, 12)
	fields = append(fields, zap.String(FieldMethod, method), zap.String(FieldCode, code.String()), zap.Duration(FieldDuration, took))
	for _, field := range [...][2]string{
		{FieldVolume, call.Volume}, {FieldTarget, call.Target}, {FieldDriver, call.Driver},
		{FieldHandler, call.Handler}, {FieldSandbox, call.Sandbox},
	} {
		if field[1] != "" {
			fields = append(fields, zap.String(field[0], field[1]))
		}
	}
	if i.Peer != nil {
		if uid, pid, ok := i.Peer(ctx); ok {
			fields = append(fields, zap.Uint32(FieldPeerUID, uid), zap.Int32(FieldPeerPID, pid))
		}
	}
	if err != nil {
		fields = append(fields, zap.String("error", status.Convert(err).Message()))
	}
	entry.Write(fields...)
}

func finish(span trace.Span, call *Call, code codes.Code, err error) {
	span.SetAttributes(
		attribute.String("rpc.system", "grpc"), attribute.String("rpc.grpc.status", code.String()),
		attribute.String("crust.volume", call.Volume), attribute.String("crust.driver", call.Driver),
		attribute.String("crust.handler", call.Handler), attribute.String("crust.sandbox", call.Sandbox))
	if err != nil {
		span.SetStatus(otelcodes.Error, status.Convert(err).Message())
	}
	span.End()
}
