package passthrough

import (
	"context"
	"testing"

	"github.com/google/go-cmp/cmp"
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
