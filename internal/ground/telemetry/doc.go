// Package telemetry makes the daemon observable: logs with constant field names, metrics,
// spans, and the gRPC interceptors that produce all three for each call. Nothing here ever
// reads the content of a request.
package telemetry

// The names of log fields. They are an interface: people search for them.
const (
	FieldVolume   = "volume"
	FieldTarget   = "target"
	FieldDriver   = "driver"
	FieldHandler  = "handler"
	FieldSandbox  = "sandbox"
	FieldMethod   = "method"
	FieldCode     = "code"
	FieldDuration = "duration"
	FieldPeerUID  = "peer_uid"
	FieldPeerPID  = "peer_pid"
	FieldAction   = "action"
	FieldStack    = "stack"
)
