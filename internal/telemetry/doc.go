// Package telemetry is how the daemon is seen from outside: logs with constant
// field names, metrics, spans, and the gRPC interceptors that make all three of
// each call. Nothing here ever looks at a request's content.
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
