package telemetry

import "context"

// Call is what is known about a gRPC call besides its method. The API fills it in while it
// serves; log, metrics and span are made from it at the end. It belongs to the goroutine
// that serves the call.
type Call struct {
	// Volume is the volume's key, Target its path.
	Volume string
	Target string
	// Driver is the CSI driver's name, as the caller gives it.
	Driver string
	// Handler is the name of the runtime handler.
	Handler string
	// Sandbox is the sandbox that answered.
	Sandbox string
	// Expected is set if the caller expects the error: it is logged at debug level.
	Expected bool
	// Forwarded is set if the driver itself answered with an error. Its text may repeat a
	// secret, and stays out of the log.
	Forwarded bool
}

type callKey struct{}

func withCall(ctx context.Context) (context.Context, *Call) {
	call := &Call{}
	return context.WithValue(ctx, callKey{}, call), call
}

// CallFrom returns the call that a context belongs to, or else a call that nobody reads, so
// that callers need no check.
func CallFrom(ctx context.Context) *Call {
	if call, ok := ctx.Value(callKey{}).(*Call); ok {
		return call
	}
	return &Call{}
}
