package passthrough

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// call is one call that is passed on, or answered locally.
type call struct {
	conn    grpc.ClientConnInterface
	method  string
	subtype string // what follows "application/grpc+"
	caller  grpc.ServerStream
	ctx     context.Context //nolint:containedctx // it lives as long as the call
}

// options returns the options of every call to a driver, which has the caller's content type.
func (c *call) options(more ...grpc.CallOption) []grpc.CallOption {
	more = append(more, grpc.ForceCodecV2(unnamed{}), grpc.MaxCallRecvMsgSize(maxMessage), grpc.MaxCallSendMsgSize(maxMessage))
	if c.subtype != "" {
		more = append(more, grpc.CallContentSubtype(c.subtype))
	}
	return more
}

// ofConnection reports whether metadata belongs to one connection: the other one has its own. Not all that begins with
// "grpc-" does: trace context (grpc-trace-bin) and retry counts are passed between the ends.
func ofConnection(key string, _ []string) bool {
	switch key {
	case "content-type", "user-agent", "te", "host",
		"grpc-encoding", "grpc-accept-encoding", "grpc-timeout",
		"grpc-status", "grpc-message", "grpc-message-type":
		return true
	}
	return strings.HasPrefix(key, ":")
}

// unary has a call with one request and one reply answered by a function.
func (c *call) unary(answer Local) error {
	var request []byte
	err := c.caller.RecvMsg(&request)
	if errors.Is(err, io.EOF) {
		return status.Errorf(codes.Internal, "%s was called without a request", c.method)
	}
	if err != nil {
		return err
	}
	reply, err := answer(c.ctx, request, c.forward)
	if err != nil {
		return err
	}
	return c.caller.SendMsg(&reply)
}

// statusDetails is the trailer in which gRPC repeats a whole status that has details.
const statusDetails = "grpc-status-details-bin"

// forward asks the driver, and passes header and trailer of its answer on. Its error is the driver's own, with its
// details: gRPC adds their trailer again. The driver's trailer is not passed on, for a Local may answer with another
// status, and a client takes the trailer for the status, or for a protocol error where the codes differ.
func (c *call) forward(ctx context.Context, request []byte) (reply []byte, err error) {
	var header, trailer metadata.MD
	err = c.conn.Invoke(ctx, c.method, &request, &reply, c.options(grpc.Header(&header), grpc.Trailer(&trailer))...)
	trailer.Delete(statusDetails)
	if len(trailer) > 0 {
		c.caller.SetTrailer(trailer)
	}
	maps.DeleteFunc(header, ofConnection)
	if len(header) > 0 {
		if sent := c.caller.SetHeader(header); err == nil {
			err = sent
		}
	}
	return reply, err
}

// anyStream describes a method of which nothing is known.
var anyStream = grpc.StreamDesc{ServerStreams: true, ClientStreams: true}

// stream passes on a call of any form. Each side is read only as fast as the other one reads:
// one message is held, and gRPC's flow control does the rest.
func (c *call) stream() error {
	ctx, cancel := context.WithCancelCause(c.ctx)
	// The handler cannot wait for the goroutine, whose read of the caller's side gRPC ends
	// only when the handler has returned.
	defer cancel(nil)
	driver, err := c.conn.NewStream(ctx, &anyStream, c.method, c.options()...)
	if err != nil {
		return err
	}
	go func() {
		if err := c.pump(driver); err != nil {
			cancel(err)
		}
	}()
	err = c.answer(driver)
	if cause := context.Cause(ctx); err != nil && cause != nil && c.ctx.Err() == nil {
		return cause // the driver was cancelled because the caller's side failed
	}
	return err
}

// pump sends the caller's messages to the driver, until the caller half-closes the stream.
func (c *call) pump(driver grpc.ClientStream) error {
	for {
		var message []byte
		if err := c.caller.RecvMsg(&message); errors.Is(err, io.EOF) {
			return driver.CloseSend()
		} else if err != nil {
			return err
		}
		err := driver.SendMsg(&message)
		if errors.Is(err, io.EOF) {
			return nil // the driver has ended the call; answer gets its status
		}
		if err != nil {
			return err
		}
	}
}

// answer sends the driver's messages, trailer and status to the caller.
func (c *call) answer(driver grpc.ClientStream) error {
	header, err := driver.Header()
	if header != nil && err == nil {
		// At once: the caller may wait for it before it sends anything.
		maps.DeleteFunc(header, ofConnection)
		err = c.caller.SendHeader(header)
	}
	if err != nil {
		return err
	}
	for {
		var message []byte
		if err := driver.RecvMsg(&message); err != nil {
			c.caller.SetTrailer(driver.Trailer())
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		if err := c.caller.SendMsg(&message); err != nil {
			return err
		}
	}
}

// codec passes messages unchanged, each as a *[]byte. It has protobuf's name, because the bytes are protobuf.
type codec struct{}

// Name is part of the content type.
func (codec) Name() string { return proto.Name }

// unnamed is the codec towards drivers: it adds nothing to the content type.
type unnamed struct{ codec }

// Name is the subtype for a caller that names none.
func (unnamed) Name() string { return "" }

// Marshal returns the bytes of a message. They must not change afterwards.
func (codec) Marshal(v any) (mem.BufferSlice, error) {
	raw, ok := v.(*[]byte)
	if !ok {
		return nil, fmt.Errorf("%T is no message of bytes", v)
	}
	return mem.BufferSlice{mem.SliceBuffer(*raw)}, nil
}

// Unmarshal copies the bytes, because gRPC reuses its buffers.
func (codec) Unmarshal(data mem.BufferSlice, v any) error {
	raw, ok := v.(*[]byte)
	if !ok {
		return fmt.Errorf("%T is no message of bytes", v)
	}
	*raw = data.Materialize()
	return nil
}
