package passthrough

import (
	"context"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
)

// call is one call that passes.
type call struct {
	conn    grpc.ClientConnInterface
	method  string
	subtype string
	caller  grpc.ServerStream
	ctx     context.Context //nolint:containedctx // it lives as long as the call
}

func newCall(conn grpc.ClientConnInterface, method string, caller grpc.ServerStream) *call {
	c := &call{conn: conn, method: method, caller: caller, ctx: caller.Context()}
	came, _ := metadata.FromIncomingContext(c.ctx)
	c.subtype = subtype(came.Get("content-type"))
	if kept := ofCall(came); len(kept) > 0 {
		c.ctx = metadata.NewOutgoingContext(c.ctx, kept)
	}
	return c
}

// options are those of every call to a driver. The content type is the caller's.
func (c *call) options(more ...grpc.CallOption) []grpc.CallOption {
	options := append(make([]grpc.CallOption, 0, 4+len(more)), grpc.ForceCodecV2(unnamed{}),
		grpc.MaxCallRecvMsgSize(maxMessage), grpc.MaxCallSendMsgSize(maxMessage))
	if c.subtype != "" {
		options = append(options, grpc.CallContentSubtype(c.subtype))
	}
	return append(options, more...)
}

// subtype is what follows "application/grpc+".
func subtype(contentType []string) string {
	if len(contentType) != 1 {
		return ""
	}
	_, subtype, _ := strings.Cut(contentType[0], "+")
	return subtype
}

// ofCall takes away what belongs to the connection that the metadata came over:
// the other connection has its own. It changes the map that it is given, which
// gRPC made for us.
func ofCall(came metadata.MD) metadata.MD {
	for key := range came {
		if ofConnection(key) {
			delete(came, key)
		}
	}
	return came
}

// ofConnection does not name all that begins with "grpc-": the context of a
// trace (grpc-trace-bin) and the counting of retries are between the ends.
func ofConnection(key string) bool {
	switch key {
	case "content-type", "user-agent", "te", "host",
		"grpc-encoding", "grpc-accept-encoding", "grpc-timeout",
		"grpc-status", "grpc-message", "grpc-message-type":
		return true
	}
	return strings.HasPrefix(key, ":")
}

// envelope is what goes around the answer to a unary call.
type envelope struct{ header, trailer metadata.MD }

func (e *envelope) options() []grpc.CallOption {
	return []grpc.CallOption{grpc.Header(&e.header), grpc.Trailer(&e.trailer)}
}

// send hands it to the caller, where there is anything in it.
func (e *envelope) send(caller grpc.ServerStream) error {
	if len(e.trailer) > 0 {
		caller.SetTrailer(e.trailer)
	}
	if header := ofCall(e.header); len(header) > 0 {
		return caller.SetHeader(header)
	}
	return nil
}
