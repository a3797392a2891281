package telemetry

import (
	"cmp"
	"context"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"go.opentelemetry.io/otel/trace"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/ground/peercred"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// Interceptors log, count, time and trace each call, and turn a panic into an error of that call alone.
type Interceptors struct {
	Log     *zap.Logger
	Metrics *Metrics
	// Tracer is nil where tracing is off.
	Tracer trace.Tracer
	// Front is set for the servers that stand in for a CSI driver.
	Front *Front
	// Ended, which may be nil, is called at the end of each call, with why it failed or "". The text is
	// the one that is logged. It must not block.
	Ended func(ctx context.Context, method string, call *Call, failure string)
}

// Front is what differs for the calls of a driver: they may have methods and error texts that we do not know.
type Front struct {
	// Driver is the driver's name.
	Driver string
	// Known holds the methods that are counted by name, and timed. All others are counted as
	// one: a caller can invent any number.
	Known map[string]bool
	// Ours holds the methods whose error texts are our own, unless the call was forwarded.
	// A driver's text may repeat a secret, and stays out of the log.
	Ours map[string]bool
}

// Options returns the options by which a server uses them.
func (i *Interceptors) Options() []grpc.ServerOption {
	return []grpc.ServerOption{grpc.UnaryInterceptor(i.unary), grpc.StreamInterceptor(i.stream)}
}

func (i *Interceptors) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (reply any, err error) {
	err = i.serve(ctx, info.FullMethod, true, func(ctx context.Context) (err error) {
		reply, err = handle(ctx, req)
		return err
	})
	return reply, err
}

// stream counts streams, and does not time them: how long a client watches says nothing
// about the daemon. The known methods of a driver are single calls, and are timed.
func (i *Interceptors) stream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	method := info.FullMethod
	if i.Front != nil && !i.Front.Known[method] {
		method = otherMethod
	}
	return i.serve(stream.Context(), method, i.Front != nil && method != otherMethod, func(ctx context.Context) error {
		return handle(srv, &streamWithContext{ServerStream: stream, ctx: ctx})
	})
}

func (i *Interceptors) serve(ctx context.Context, method string, timed bool, handle func(context.Context) error) (err error) {
	start := time.Now()
	call := &Call{}
	if i.Front != nil {
		call.Driver = i.Front.Driver
	}
	ctx = context.WithValue(ctx, callKey{}, call)
	var span trace.Span
	if i.Tracer != nil {
		ctx, span = i.Tracer.Start(withParent(ctx), strings.TrimPrefix(method, "/"), trace.WithSpanKind(trace.SpanKindServer))
	}
	defer func() {
		if cause := recover(); cause != nil {
			i.Log.Error("panic in a call", zap.String(FieldMethod, method), // without its value, which may hold anything
				zap.String("panic_type", fmt.Sprintf("%T", cause)), zap.ByteString(FieldStack, debug.Stack()))
			err = status.Errorf(codes.Internal, "crust-proxy failed inside %s; its log has the details", method)
		}
		took := time.Since(start)
		code, text := i.outcome(method, call, err)
		i.Metrics.called(method, call, code, timed, took)
		i.log(ctx, method, call, code, took, text)
		if i.Ended != nil {
			i.Ended(ctx, method, call, text)
		}
		if span != nil {
			finish(span, call, code)
		}
	}()
	return handle(ctx)
}

// otherMethod stands for all methods that are not known.
const otherMethod = "/other/other"

// streamWithContext is a stream whose context knows its call.
type streamWithContext struct {
	grpc.ServerStream
	ctx context.Context //nolint:containedctx // this is how gRPC hands a stream its context
}

func (s *streamWithContext) Context() context.Context { return s.ctx }

// isRead reports whether a method changes nothing, by its name. These are called often, and their
// success is logged at debug level.
func isRead(method string) bool {
	short := method[strings.LastIndexByte(method, '/')+1:]
	for _, prefix := range [...]string{"Runtime", "Node", "Controller"} {
		short = strings.TrimPrefix(short, prefix)
	}
	reads := []string{"Get", "List", "Watch", "Check", "Probe"}
	return slices.ContainsFunc(reads, func(verb string) bool { return strings.HasPrefix(short, verb) })
}

// outcome is the code that gRPC will answer, also for the error of a context, and why the call failed, or "". The
// text of an error that may repeat a secret is replaced.
func (i *Interceptors) outcome(method string, call *Call, err error) (code codes.Code, failure string) {
	if err == nil {
		return codes.OK, ""
	}
	known, ok := status.FromError(err)
	if !ok {
		known = status.FromContextError(err)
	}
	if i.Front == nil || i.Front.Ours[method] && !call.Forwarded {
		return known.Code(), cmp.Or(known.Message(), known.Code().String())
	}
	return known.Code(), "the driver answered " + known.Code().String()
}

func (i *Interceptors) log(ctx context.Context, method string, call *Call, code codes.Code, took time.Duration, failure string) {
	level := zapcore.InfoLevel
	switch {
	case call.Expected, failure == "" && isRead(method):
		level = zapcore.DebugLevel
	case failure != "":
		level = zapcore.WarnLevel
	}
	entry := i.Log.Check(level, "call")
	if entry == nil {
		return
	}
	fields := make([]zap.Field, 0, 15)
	fields = append(fields, zap.String(FieldMethod, method), zap.String(FieldCode, code.String()), zap.Duration(FieldDuration, took))
	for _, field := range [...][2]string{
		{FieldVolume, call.Volume}, {FieldTarget, sys.ClipTo(call.Target, unix.PathMax)},
		{FieldCSIVolume, sys.ClipTo(call.CSIVolume, maxName)}, {FieldDriver, call.Driver}, {FieldHandler, call.Handler},
		{FieldPod, sys.ClipTo(call.Pod, 2*maxName)}, {FieldRule, call.Rule}, {FieldSandbox, call.Sandbox},
	} {
		if field[1] != "" {
			fields = append(fields, zap.String(field[0], field[1]))
		}
	}
	if who, ok := peercred.FromContext(ctx); ok {
		fields = append(fields, zap.Uint32(FieldPeerUID, who.UID), zap.Int32(FieldPeerPID, who.PID))
	}
	if failure != "" {
		fields = append(fields, zap.String("error", failure))
	}
	entry.Write(fields...)
}

// Call is what is known about a gRPC call besides its method. The API fills it in while it serves; log, metrics and
// span are made from it at the end. It belongs to the goroutine that serves the call.
type Call struct {
	// Volume is the volume's key, Target the path that the call is about. CSIVolume is the driver's own id of the
	// volume, Driver the driver's name, as the caller gives it. Handler is the runtime handler's name, Pod a namespace
	// and name, Rule the policy's that decides, and Sandbox the one that answered.
	Volume, Target, CSIVolume, Driver, Handler, Pod, Rule, Sandbox string
	// Detail says what a call has done, where its method does not: for the volume's history. Repeated is
	// set if everything was done already.
	Detail   string
	Repeated bool
	// Expected is set if the caller expects the error: it is logged at debug level.
	Expected bool
	// Forwarded is set if the driver itself answered with an error. Its text may repeat a
	// secret, and stays out of the log.
	Forwarded bool
}

// maxName bounds the names that a request contains; CSI's limit for an id is 128.
const maxName = 256

type callKey struct{}

// CallFrom returns the call that a context belongs to, or else a call that nobody reads, so that callers need no check.
func CallFrom(ctx context.Context) *Call {
	if call, ok := ctx.Value(callKey{}).(*Call); ok {
		return call
	}
	return &Call{}
}
