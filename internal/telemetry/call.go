package telemetry

import "context"

// Call is what is known of a gRPC call besides its method: the API fills it in
// while it serves, and log, metrics and span are made of it at the end. It
// belongs to the goroutine that serves the call.
type Call struct {
	// Volume is the volume's key, Target its path.
	Volume string
	Target string
	// Driver is the CSI driver's name, by the caller's word.
	Driver string
	// Handler is the name of the runtime handler.
	Handler string
	// Sandbox is the sandbox that answered.
	Sandbox string
	// Expected is set where an error is what the caller counts on: it is logged at
	// debug level.
	Expected bool
	// Forwarded is set where the driver itself answered with an error. Its words may repeat a
	// secret, and stay out of the log.
	Forwarded bool
}

type callKey struct{}

func withCall(ctx context.Context) (context.Context, *Call) {
	call := &Call{}
	return context.WithValue(ctx, callKey{}, call), call
}

// CallFrom gives the call that a context belongs to. Outside of one it gives a
// call that nobody looks at, so that its callers need not ask.
func CallFrom(ctx context.Context) *Call {
	if call, ok := ctx.Value(callKey{}).(*Call); ok {
		return call
	}
	return &Call{}
}
