// Package telemetry makes the daemon observable: logs with constant field names, metrics, spans, and the gRPC
// interceptors that produce all three for each call. Nothing here ever reads the content of a request.
package telemetry

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"github.com/go-logr/logr"
	"go.uber.org/zap"
	"go.uber.org/zap/buffer"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// The names of log fields. They are an interface: people search for them.
const (
	FieldVolume    = "volume"
	FieldTarget    = "target"
	FieldCSIVolume = "csi_volume_id"
	FieldDriver    = "driver"
	FieldHandler   = "handler"
	FieldPod       = "pod"
	FieldRule      = "rule"
	FieldSandbox   = "sandbox"
	FieldMethod    = "method"
	FieldCode      = "code"
	FieldDuration  = "duration"
	FieldPeerUID   = "peer_uid"
	FieldPeerPID   = "peer_pid"
	FieldAction    = "action"
	FieldStack     = "stack"
)

// NewLogger returns the JSON logger. The level can be changed later. For the journal each line begins with
// its priority, so that `journalctl -p warning` works; the journal takes it off. While nobody reads a file, its lines
// are dropped.
func NewLogger(out io.Writer, level zap.AtomicLevel) *zap.Logger {
	encoding := zap.NewProductionEncoderConfig()
	encoding.TimeKey = "time"
	encoding.EncodeTime = zapcore.RFC3339NanoTimeEncoder
	encoding.EncodeDuration = zapcore.SecondsDurationEncoder
	encoder := zapcore.NewJSONEncoder(encoding)
	if file, ok := out.(*os.File); ok {
		var st unix.Stat_t
		err := sys.OnFD(file, func(fd int) error { return unix.Fstat(fd, &st) })
		if err == nil && os.Getenv("JOURNAL_STREAM") == fmt.Sprintf("%d:%d", st.Dev, st.Ino) { // systemd connected it to the journal
			encoder = prioritized{encoder}
		}
	}
	if file, ok := out.(*os.File); ok {
		out = &sink{file: file, encoder: encoder}
	}
	return zap.New(zapcore.NewCore(encoder, zapcore.Lock(zapcore.AddSync(out)), level))
}

// prioritized puts the priority of syslog before each line.
type prioritized struct{ zapcore.Encoder }

func (p prioritized) Clone() zapcore.Encoder { return prioritized{p.Encoder.Clone()} }

func (p prioritized) EncodeEntry(entry zapcore.Entry, fields []zapcore.Field) (*buffer.Buffer, error) {
	line, err := p.Encoder.EncodeEntry(entry, fields)
	if err != nil {
		return nil, err
	}
	defer line.Free()
	priority := map[zapcore.Level]string{zapcore.DebugLevel: "<7>", zapcore.InfoLevel: "<6>", zapcore.WarnLevel: "<4>"}
	out := buffers.Get()
	out.AppendString(cmp.Or(priority[entry.Level], "<3>"))
	_, err = out.Write(line.Bytes())
	return out, err
}

var buffers = buffer.NewPool()

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

func (s *logrSink) WithValues(values ...any) logr.LogSink {
	return &logrSink{log: s.log.With(fieldsOf(values)...)}
}

func (s *logrSink) WithName(name string) logr.LogSink { return &logrSink{log: s.log.Named(name)} }

func fieldsOf(values []any) []zap.Field {
	fields := make([]zap.Field, 0, len(values)/2)
	for i := 0; i+1 < len(values); i += 2 {
		fields = append(fields, zap.Any(fmt.Sprint(values[i]), values[i+1]))
	}
	return fields
}

const (
	// pipeBuf is what a pipe or a socket takes without waiting, if poll finds it writable: PIPE_BUF.
	pipeBuf = 4096
	// readTime is how long a line waits for a reader that is slow. Once one was dropped, the next ones do not wait.
	readTime = 100 * time.Millisecond
)

// sink writes the lines of a log, and drops them while nobody reads it. A call logs before it answers, and must not
// wait for journald or for a container runtime. The file is not made non-blocking: other processes share that. One
// goroutine at a time writes.
type sink struct {
	file    *os.File
	encoder zapcore.Encoder
	dropped int
}

// Write drops what it cannot write, without an error: zap would write that to stderr, which may be this file.
func (s *sink) Write(line []byte) (int, error) {
	text := line
	if s.dropped > 0 {
		text = append(s.reportDropped(), line...)
	}
	if s.write(text) {
		s.dropped = 0
	} else {
		s.dropped++
	}
	return len(line), nil
}

// reportDropped says how many lines were dropped. The first may have been written in part.
func (s *sink) reportDropped() []byte {
	entry := zapcore.Entry{Level: zap.WarnLevel, Time: time.Now(), Message: "lines of the log were dropped, because nobody read it"}
	line, err := s.encoder.EncodeEntry(entry, []zap.Field{zap.Int("lines", s.dropped)})
	if err != nil {
		return nil
	}
	return append([]byte{'\n'}, line.Bytes()...)
}

func (s *sink) write(text []byte) (whole bool) {
	for part := range slices.Chunk(text, pipeBuf) {
		if err := sys.OnFD(s.file, s.awaitReader); err != nil {
			return false
		}
		if _, err := s.file.Write(part); err != nil {
			return false
		}
	}
	return true
}

func (s *sink) awaitReader(fd int) error {
	end := time.Now()
	if s.dropped == 0 {
		end = end.Add(readTime)
	}
	for {
		ready := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}} //nolint:gosec // descriptors are small
		switch n, err := unix.Poll(ready, int(max(0, time.Until(end).Milliseconds()))); {
		case errors.Is(err, unix.EINTR):
		case n == 0:
			return unix.EAGAIN
		default:
			return err
		}
	}
}
