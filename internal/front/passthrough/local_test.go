package passthrough

import (
	"context"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// TestLocal: a method that is answered here may ask the driver, as often as it
// likes and with what it likes, or not at all.
func TestLocal(t *testing.T) {
	t.Parallel()
	r := newRig(t, parts{driver: raw(echo), local: map[string]Local{
		"/l/alone": func(_ context.Context, request []byte, _ Forward) ([]byte, error) {
			return append([]byte("alone "), request...), nil
		},
		"/l/twice": func(ctx context.Context, request []byte, forward Forward) ([]byte, error) {
			once, err := forward(ctx, append([]byte("<"), request...))
			if err != nil {
				return nil, err
			}
			return forward(ctx, append(once, '>'))
		},
		"/l/never": func(context.Context, []byte, Forward) ([]byte, error) {
			return nil, status.Error(codes.FailedPrecondition, "not here")
		},
	}})
	got := make(map[string]string)
	for _, method := range []string{"/l/alone", "/l/twice", "/l/never", "/l/passed"} {
		reply, err := ask(patience(t), r.proxied, method, []byte("request"))
		if err != nil {
			reply = []byte(err.Error())
		}
		got[method] = string(reply)
	}
	want := map[string]string{
		"/l/alone": "alone request", "/l/twice": "<request>", "/l/passed": "request",
		"/l/never": "rpc error: code = FailedPrecondition desc = not here",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// TestLocalChangesAStatusWithDetails: the details of the driver's status travel in a trailer
// that holds the whole status. It must not replace the one that is answered here.
func TestLocalChangesAStatusWithDetails(t *testing.T) {
	t.Parallel()
	failed, err := status.New(codes.Unavailable, "the driver's words").WithDetails(&errdetails.RetryInfo{})
	if err != nil {
		t.Fatal(err)
	}
	changed := func(answer []byte, err error) Local {
		return func(ctx context.Context, request []byte, forward Forward) ([]byte, error) {
			if _, failed := forward(ctx, request); failed == nil {
				t.Error("the driver did not fail")
			}
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
		if got := status.Convert(err); got.String() != want.String() || len(got.Details()) != len(want.Details()) {
			t.Errorf("%s: got %v, want %v", method, got.Proto(), want.Proto())
		}
	}
}
