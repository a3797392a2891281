package passthrough

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// passOn answers with what the driver answers.
func passOn(ctx context.Context, request []byte, forward Forward) ([]byte, error) {
	return forward(ctx, request)
}

// threeWays are a method of each way through the proxy.
func threeWays() map[string]string {
	return map[string]string{
		"known": csi.Node_NodeGetInfo_FullMethodName, "unknown": "/vendor.v1.Service/Method", "local": csi.Node_NodeStageVolume_FullMethodName,
	}
}

// outcome is all that a caller sees of a unary call.
type outcome struct {
	Reply           string
	Header, Trailer metadata.MD
	Status          *spb.Status
}

func outcomeOf(ctx context.Context, conn *grpc.ClientConn, method string, options ...grpc.CallOption) outcome {
	var o outcome
	reply, err := ask(ctx, conn, method, []byte("request"), append(options, grpc.Header(&o.Header), grpc.Trailer(&o.Trailer))...)
	o.Reply, o.Status = string(reply), status.Convert(err).Proto()
	return o
}

func failure(t *testing.T) error {
	t.Helper()
	detailed := check.Value(status.New(codes.ResourceExhausted, "the pool is full: ünïcode, %25\n").
		WithDetails(&errdetails.RetryInfo{}, &errdetails.ErrorInfo{Reason: "FULL", Domain: "driver.example"}))(t)
	return detailed.Err()
}

// TestAroundUnaryCalls: headers, trailers and the status are those of a direct call.
func TestAroundUnaryCalls(t *testing.T) {
	t.Parallel()
	header := metadata.Pairs("h", "1", "h", "2", "h-bin", "\x00\xff", "grpc-accept-encoding", "identity")
	trailer := metadata.Pairs("t", "1", "t", "2", "t-bin", "\xfe\x00", "grpc-retry-pushback-ms", "17")
	failed := failure(t)
	for name, driver := range map[string]func(grpc.ServerStream) error{
		"plain":                func(s grpc.ServerStream) error { return echo(nil, s) },
		"header":               func(s grpc.ServerStream) error { return errors.Join(s.SetHeader(header), echo(nil, s)) },
		"header at once":       func(s grpc.ServerStream) error { return errors.Join(s.SendHeader(header), echo(nil, s)) },
		"trailer":              func(s grpc.ServerStream) error { s.SetTrailer(trailer); return echo(nil, s) },
		"error":                func(grpc.ServerStream) error { return failed },
		"error and header":     func(s grpc.ServerStream) error { _ = s.SendHeader(header); return failed },
		"error and trailer":    func(s grpc.ServerStream) error { s.SetTrailer(trailer); return failed },
		"error without a text": func(grpc.ServerStream) error { return status.Error(codes.DataLoss, "") },
		"a code of the future": func(grpc.ServerStream) error { return status.Error(codes.Code(77), "later") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, parts{
				driver: raw(func(_ any, s grpc.ServerStream) error { return driver(s) }),
				local:  map[string]Local{csi.Node_NodeStageVolume_FullMethodName: passOn},
			})
			for way, method := range threeWays() {
				direct, proxied := outcomeOf(patience(t), r.direct, method), outcomeOf(patience(t), r.proxied, method)
				direct.Header.Delete("grpc-accept-encoding") // of the connection
				check.Same(t, cmp.Diff(direct, proxied, protocmp.Transform()), "%s: the proxy makes a difference (-direct +proxied)", way)
			}
		})
	}
}

// TestMetadataOfTheCaller: the driver sees what the caller sent.
func TestMetadataOfTheCaller(t *testing.T) {
	t.Parallel()
	seen := make(chan metadata.MD, 1)
	r := newRig(t, parts{
		driver: raw(func(srv any, s grpc.ServerStream) error { seen <- mdOf(s.Context()); return echo(srv, s) }),
		local:  map[string]Local{csi.Node_NodeStageVolume_FullMethodName: passOn},
	})
	ctx := metadata.AppendToOutgoingContext(patience(t), "token", "s3cret", "list", "a", "list", "b", "some-bin", "\x00\x01\xff",
		"grpc-trace-bin", "\x00trace", "grpc-previous-rpc-attempts", "2", "traceparent", "00-1-2-01")
	for way, method := range threeWays() {
		var got []metadata.MD
		for _, conn := range []*grpc.ClientConn{r.direct, r.proxied} {
			check.Value(ask(ctx, conn, method, nil))(t)
			got = append(got, <-seen)
		}
		check.Same(t, cmp.Diff(got[0], got[1]), "%s: the driver sees another caller (-direct +proxied)", way)
	}
}

// TestContentType: a subtype is the caller's, and none is added. One that compresses is served.
func TestContentType(t *testing.T) {
	t.Parallel()
	seen := make(chan metadata.MD, 1)
	r := newRig(t, parts{driver: raw(func(srv any, s grpc.ServerStream) error { seen <- mdOf(s.Context()); return echo(srv, s) })})
	for want, option := range map[string][]grpc.CallOption{
		"application/grpc":      {grpc.ForceCodecV2(unnamed{}), grpc.UseCompressor(gzip.Name)},
		"application/grpc+json": {grpc.ForceCodecV2(codec{}), grpc.CallContentSubtype("json")},
	} {
		var reply []byte
		err := r.proxied.Invoke(patience(t), "/x/y", message("request"), &reply, option...)
		check.Require(t, err == nil && string(reply) == "request", "%v", err)
		got := (<-seen).Get("content-type")
		check.That(t, cmp.Equal(got, []string{want}), "the driver sees %v for %s", got, want)
	}
}

// TestUnknownToTheDriver: a real server says so itself, as to a direct caller.
func TestUnknownToTheDriver(t *testing.T) {
	t.Parallel()
	r := newRig(t, parts{register: func(s *grpc.Server) { csi.RegisterIdentityServer(s, csi.UnimplementedIdentityServer{}) }})
	for _, method := range []string{csi.Identity_Probe_FullMethodName, "/csi.v1.Identity/Later", "/csi.v2.Node/Any", csi.Node_NodeGetInfo_FullMethodName} {
		direct, proxied := outcomeOf(patience(t), r.direct, method), outcomeOf(patience(t), r.proxied, method)
		check.Same(t, cmp.Diff(direct, proxied, protocmp.Transform()), "%s (-direct +proxied)", method)
	}
}

// TestDeadline: the driver knows how long the caller waits.
func TestDeadline(t *testing.T) {
	t.Parallel()
	left := make(chan time.Duration, 1)
	r := newRig(t, parts{driver: raw(func(srv any, s grpc.ServerStream) error {
		deadline, _ := s.Context().Deadline()
		left <- time.Until(deadline)
		return echo(srv, s)
	})})
	for way, method := range threeWays() {
		ctx, cancel := context.WithTimeout(patience(t), 50*time.Second) // and none has to be used up
		got := outcomeOf(ctx, r.proxied, method)
		cancel()
		check.Require(t, got.Status.GetCode() == 0, "%s: %v", way, got.Status)
		rest := <-left
		check.That(t, rest > 0 && rest <= 50*time.Second, "%s: the driver was given %s", way, rest)
	}
}

// TestCancelledCaller: the driver's call ends with the caller's.
func TestCancelledCaller(t *testing.T) {
	t.Parallel()
	for way, method := range threeWays() {
		begun, ended := make(chan struct{}), make(chan struct{})
		r := newRig(t, parts{
			driver: raw(func(_ any, s grpc.ServerStream) error {
				close(begun)
				<-s.Context().Done()
				close(ended)
				return s.Context().Err()
			}),
			local: map[string]Local{csi.Node_NodeStageVolume_FullMethodName: passOn},
		})
		ctx, cancel := context.WithCancel(patience(t))
		failed := check.Begin(func() error { return check.Err(ask(ctx, r.proxied, method, nil)) })
		waitFor(t, way+": the call reaches the driver", begun)
		cancel()
		err := <-failed
		check.That(t, status.Code(err) == codes.Canceled, "%s: %v", way, err)
		waitFor(t, way+": the driver's call ends", ended)
	}
}

// TestUnaryCallWithoutRequest: a caller that says nothing is told so.
func TestUnaryCallWithoutRequest(t *testing.T) {
	t.Parallel()
	r := newRig(t, parts{driver: raw(echo), local: map[string]Local{csi.Node_NodeStageVolume_FullMethodName: passOn}})
	for _, method := range []string{csi.Node_NodeGetInfo_FullMethodName, csi.Node_NodeStageVolume_FullMethodName} {
		stream := open(patience(t), t, r.proxied, method)
		check.Must(t, stream.CloseSend())
		_, err := all(stream)
		check.That(t, status.Code(err) == codes.Internal, "%s: %v", method, err)
	}
}

// TestLocalChangesAStatusWithDetails: the details of the driver's status travel in a trailer
// that holds the whole status. It must not replace the one that is answered here.
func TestLocalChangesAStatusWithDetails(t *testing.T) {
	t.Parallel()
	failed := check.Value(status.New(codes.Unavailable, "the driver's words").WithDetails(&errdetails.RetryInfo{}))(t)
	changed := func(answer []byte, err error) Local {
		return func(ctx context.Context, request []byte, forward Forward) ([]byte, error) {
			_, failed := forward(ctx, request)
			check.That(t, failed != nil, "the driver did not fail")
			return answer, err
		}
	}
	r := newRig(t, parts{
		driver: raw(func(any, grpc.ServerStream) error { return failed.Err() }),
		local: map[string]Local{
			"/l/text": changed(nil, status.Error(codes.Unavailable, "other words")),
			"/l/code": changed(nil, status.Error(codes.Aborted, "other words")),
			"/l/none": changed([]byte("done"), nil),
			"/l/same": func(ctx context.Context, request []byte, forward Forward) ([]byte, error) {
				return forward(ctx, request)
			},
		},
	})
	for method, want := range map[string]*status.Status{
		"/l/text": status.New(codes.Unavailable, "other words"), "/l/code": status.New(codes.Aborted, "other words"),
		"/l/none": nil, "/l/same": failed,
	} {
		_, err := ask(patience(t), r.proxied, method, []byte("request"))
		got := status.Convert(err)
		check.That(t, got.String() == want.String() && len(got.Details()) == len(want.Details()), "%s: got %v, want %v", method, got.Proto(), want.Proto())
	}
}
