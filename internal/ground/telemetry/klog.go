package telemetry

import (
	"fmt"

	"github.com/go-logr/logr"
	"go.uber.org/zap"
)

// Logr returns a logger for the libraries of Kubernetes. It writes to ours: their
// information at debug level, their errors as warnings.
func Logr(log *zap.Logger) logr.Logger { return logr.New(&logrSink{log: log}) }

type logrSink struct{ log *zap.Logger }

var _ logr.LogSink = (*logrSink)(nil)

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
