// Package passthrough is a gRPC proxy that does not decode messages: the driver gets what the caller sends, and the
// caller what the driver answers, byte for byte. Methods that are answered locally are registered by name.
package passthrough

import (
	"context"
	"maps"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	_ "google.golang.org/grpc/encoding/gzip" // callers and drivers may compress
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// Local answers a unary method in the driver's place. Forward asks the driver.
type Local func(ctx context.Context, request []byte, forward Forward) (reply []byte, err error)

// Forward calls the same method of the driver.
type Forward = func(ctx context.Context, request []byte) (reply []byte, err error)

// Proxy stands between a caller and a driver.
type Proxy struct {
	conn  grpc.ClientConnInterface
	unary map[string]Local // by method; all others may be streams
}

// New makes a proxy to the driver behind a connection. The functions in local answer the methods of those full names.
func New(conn grpc.ClientConnInterface, local map[string]Local) *Proxy {
	unary := make(map[string]Local)
	for method := range UnaryMethods() {
		unary[method] = func(ctx context.Context, request []byte, forward Forward) ([]byte, error) {
			return forward(ctx, request)
		}
	}
	maps.Copy(unary, local)
	return &Proxy{conn: conn, unary: unary}
}

// UnaryMethods returns the methods of CSI that are known to be unary: they need neither a
// stream nor a second goroutine.
func UnaryMethods() map[string]bool {
	known := make(map[string]bool)
	for _, service := range []*grpc.ServiceDesc{
		&csi.Identity_ServiceDesc, &csi.Controller_ServiceDesc, &csi.GroupController_ServiceDesc,
		&csi.SnapshotMetadata_ServiceDesc, &csi.Node_ServiceDesc,
	} {
		for _, method := range service.Methods {
			known["/"+service.ServiceName+"/"+method.MethodName] = true
		}
	}
	return known
}

// The windows are fixed: gRPC's estimation costs a ping for nearly every call, which wakes
// both ends. A window also bounds what is buffered of a stream whose receiver does not read.
const (
	streamWindow = 1 << 20
	connWindow   = 4 << 20
)

// streamWorkers handle calls on stacks that have grown already; calls beyond them get goroutines of their own.
const streamWorkers = 4

// DialOptions are for the connection to a driver.
func DialOptions() []grpc.DialOption {
	return []grpc.DialOption{grpc.WithInitialWindowSize(streamWindow), grpc.WithInitialConnWindowSize(connWindow)}
}

// maxMessage bounds a message, also after gRPC has decompressed it: a few KiB of gzip
// can be gigabytes. It is far above the 4 MiB that kubelet and the sidecars take.
const maxMessage = 16 << 20

// ServerOptions are for the gRPC server that serves the proxy. It needs no registered
// service, and hardly limits pings: the two ends have their own limits.
func (p *Proxy) ServerOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.ForceServerCodecV2(codec{}), grpc.UnknownServiceHandler(p.handle),
		grpc.MaxRecvMsgSize(maxMessage), grpc.MaxSendMsgSize(maxMessage),
		grpc.NumStreamWorkers(streamWorkers), grpc.InitialWindowSize(streamWindow), grpc.InitialConnWindowSize(connWindow),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: time.Second, PermitWithoutStream: true}),
	}
}

func (p *Proxy) handle(_ any, caller grpc.ServerStream) error {
	method, ok := grpc.MethodFromServerStream(caller)
	if !ok {
		return status.Error(codes.Internal, "a call without a method")
	}
	c := &call{conn: p.conn, method: method, caller: caller, ctx: caller.Context()}
	came, _ := metadata.FromIncomingContext(c.ctx)
	if contentType := came.Get("content-type"); len(contentType) == 1 {
		_, c.subtype, _ = strings.Cut(contentType[0], "+")
	}
	maps.DeleteFunc(came, ofConnection) // gRPC made the map for us
	if len(came) > 0 {
		c.ctx = metadata.NewOutgoingContext(c.ctx, came)
	}
	if answer := p.unary[method]; answer != nil {
		return c.unary(answer)
	}
	return c.stream()
}
