package passthrough

import (
	"context"
	"errors"
	"io"
	"math"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// Local answers a unary method in the driver's place. Forward asks the driver.
type Local func(ctx context.Context, method string, request []byte, forward Forward) (reply []byte, err error)

// Forward sends a request of the method in hand to the driver.
type Forward = func(ctx context.Context, request []byte) (reply []byte, err error)

// Proxy stands between a caller and a driver.
type Proxy struct {
	conn  func() (grpc.ClientConnInterface, error)
	local map[string]Local
	unary map[string]bool
}

// New makes a proxy to the driver that conn gives at each call. Methods in local,
// by their full names, are answered by it.
func New(conn func() (grpc.ClientConnInterface, error), local map[string]Local) *Proxy {
	return &Proxy{conn: conn, local: local, unary: UnaryMethods()}
}

// UnaryMethods are the methods of CSI that are known to have one request and one reply:
// they need neither a stream nor a second goroutine.
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
	// These came with CSI 1.13.
	known["/csi.v1.Node/NodeGetVolumeHealth"] = true
	known["/csi.v1.Node/NodeGetStorageHealth"] = true
	return known
}

// ServerOptions make a gRPC server of the proxy. It needs no registered service,
// and has no limit of its own on the size of messages: the two ends have theirs.
func (p *Proxy) ServerOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.ForceServerCodecV2(codec{}), grpc.UnknownServiceHandler(p.handle),
		grpc.MaxRecvMsgSize(math.MaxInt32), grpc.MaxSendMsgSize(math.MaxInt32),
	}
}

var callOptions = []grpc.CallOption{
	grpc.ForceCodecV2(codec{}), grpc.MaxCallRecvMsgSize(math.MaxInt32), grpc.MaxCallSendMsgSize(math.MaxInt32),
}

func (p *Proxy) handle(_ any, caller grpc.ServerStream) error {
	method, ok := grpc.MethodFromServerStream(caller)
	if !ok {
		return status.Error(codes.Internal, "a call without a method")
	}
	conn, err := p.conn()
	if err != nil {
		return status.Error(codes.Unavailable, err.Error())
	}
	call := &call{conn: conn, method: method, caller: caller, ctx: outgoing(caller.Context())}
	switch answer := p.local[method]; {
	case answer != nil:
		return call.locally(answer)
	case p.unary[method]:
		return call.once()
	default:
		return call.stream()
	}
}

// outgoing hands the caller's metadata on, but for what belongs to its own
// connection.
func outgoing(ctx context.Context) context.Context {
	came, _ := metadata.FromIncomingContext(ctx)
	var kept metadata.MD
	for key, values := range came {
		if ofConnection(key) {
			continue
		}
		if kept == nil {
			kept = make(metadata.MD)
		}
		kept[key] = values
	}
	if kept == nil {
		return ctx
	}
	return metadata.NewOutgoingContext(ctx, kept)
}

func ofConnection(key string) bool {
	return strings.HasPrefix(key, ":") || strings.HasPrefix(key, "grpc-") ||
		key == "content-type" || key == "user-agent" || key == "te"
}

// call is one call that passes.
type call struct {
	conn   grpc.ClientConnInterface
	method string
	caller grpc.ServerStream
	ctx    context.Context //nolint:containedctx // it lives as long as the call
}

// once passes a unary call.
func (c *call) once() error {
	request, reply := &Frame{}, &Frame{}
	if err := c.caller.RecvMsg(request); err != nil {
		return err
	}
	defer request.Free()
	defer reply.Free()
	if err := c.invoke(c.ctx, request, reply); err != nil {
		return err
	}
	return c.caller.SendMsg(reply)
}

// invoke asks the driver and hands on what goes around its answer.
func (c *call) invoke(ctx context.Context, request, reply *Frame) error {
	var header, trailer metadata.MD
	options := append(make([]grpc.CallOption, 0, len(callOptions)+2), callOptions...)
	err := c.conn.Invoke(ctx, c.method, request, reply, append(options, grpc.Header(&header), grpc.Trailer(&trailer))...)
	if around := c.around(header, trailer); err == nil {
		err = around
	}
	return err // the driver's own, with its details
}

// around hands headers and trailers to the caller.
func (c *call) around(header, trailer metadata.MD) error {
	if len(trailer) > 0 {
		c.caller.SetTrailer(trailer)
	}
	for key := range header {
		if !ofConnection(key) {
			return c.caller.SetHeader(header)
		}
	}
	return nil
}

// locally has a method answered in the driver's place.
func (c *call) locally(answer Local) error {
	request := &Frame{}
	if err := c.caller.RecvMsg(request); err != nil {
		return err
	}
	raw := request.Bytes()
	request.Free()
	reply, err := answer(c.ctx, c.method, raw, c.forward)
	if err != nil {
		return err
	}
	return c.caller.SendMsg(NewFrame(reply))
}

func (c *call) forward(ctx context.Context, request []byte) ([]byte, error) {
	reply := &Frame{}
	defer reply.Free()
	if err := c.invoke(ctx, NewFrame(request), reply); err != nil {
		return nil, err
	}
	return reply.Bytes(), nil
}

// anyStream is how a method is called of which nothing is known.
var anyStream = grpc.StreamDesc{ServerStreams: true, ClientStreams: true}

// stream passes a call of any form. Each side is read only as fast as the other
// one takes it.
func (c *call) stream() error {
	ctx, cancel := context.WithCancel(c.ctx)
	defer cancel()
	driver, err := c.conn.NewStream(ctx, &anyStream, c.method, callOptions...)
	if err != nil {
		return err
	}
	go func() {
		if err := c.pump(driver); err != nil {
			cancel()
		}
	}()
	err = c.answer(driver)
	cancel()
	// The caller's side is read by the goroutine until this handler returns, so
	// it cannot be waited for: gRPC ends that read when the handler has ended.
	return err
}

// pump hands the caller's messages to the driver until the caller has no more.
func (c *call) pump(driver grpc.ClientStream) error {
	for {
		frame := &Frame{}
		if err := c.caller.RecvMsg(frame); errors.Is(err, io.EOF) {
			return driver.CloseSend()
		} else if err != nil {
			return err
		}
		err := driver.SendMsg(frame)
		frame.Free()
		if errors.Is(err, io.EOF) {
			return nil // the driver has ended; its status comes on the other way
		}
		if err != nil {
			return err
		}
	}
}

// answer hands the driver's messages to the caller, and its last word.
func (c *call) answer(driver grpc.ClientStream) error {
	header, err := driver.Header()
	if err == nil && len(header) > 0 {
		err = c.caller.SendHeader(header)
	}
	for err == nil {
		frame := &Frame{}
		if err = driver.RecvMsg(frame); err == nil {
			err = c.caller.SendMsg(frame)
			frame.Free()
		}
	}
	c.caller.SetTrailer(driver.Trailer())
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}
