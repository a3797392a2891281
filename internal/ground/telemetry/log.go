// Package telemetry makes the daemon observable: logs with constant field names, metrics,
// spans, and the gRPC interceptors that produce all three for each call. Nothing here ever
// reads the content of a request.
package telemetry

import (
	"fmt"
	"io"

	"github.com/go-logr/logr"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

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

// NewLogger returns the JSON logger. The level can be changed later.
func NewLogger(out io.Writer, level zap.AtomicLevel) *zap.Logger {
	encoding := zap.NewProductionEncoderConfig()
	encoding.TimeKey = "time"
	encoding.EncodeTime = zapcore.RFC3339NanoTimeEncoder
	encoding.EncodeDuration = zapcore.SecondsDurationEncoder
	core := zapcore.NewCore(zapcore.NewJSONEncoder(encoding), zapcore.Lock(zapcore.AddSync(out)), level)
	return zap.New(core)
}

// Level parses a level's name; an unknown one is info.
func Level(name string) zapcore.Level {
	level, _ := zapcore.ParseLevel(name) // info, if there is an error
	return level
}

// Logr returns a logger for the libraries of Kubernetes. It writes to ours: their
// information at debug level, their errors as warnings.
func Logr(log *zap.Logger) logr.Logger { return logr.New(&logrSink{log: log}) }

type logrSink struct{ log *zap.Logger }

// Init does nothing.
func (*logrSink) Init(logr.RuntimeInfo) {}

// Enabled leaves out the higher levels, which are for their developers.
func (*logrSink) Enabled(level int) bool { return level <= 0 }

// Info logs at debug level.
func (s *logrSink) Info(_ int, message string, values ...any) {
	s.log.Debug(message, fieldsOf(values)...)
}

// Error logs a warning: the libraries retry by themselves.
func (s *logrSink) Error(err error, message string, values ...any) {
	s.log.Warn(message, append(fieldsOf(values), zap.Error(err))...)
}

// WithValues adds fields.
func (s *logrSink) WithValues(values ...any) logr.LogSink {
	return &logrSink{log: s.log.With(fieldsOf(values)...)}
}

// WithName adds a name.
func (s *logrSink) WithName(name string) logr.LogSink { return &logrSink{log: s.log.Named(name)} }

func fieldsOf(values []any) []zap.Field {
	fields := make([]zap.Field, 0, len(values)/2)
	for i := 0; i+1 < len(values); i += 2 {
		fields = append(fields, zap.Any(fmt.Sprint(values[i]), values[i+1]))
	}
	return fields
}
