package telemetry

import (
	"io"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// NewLogger makes the JSON logger. The level can be changed later.
func NewLogger(out io.Writer, level zap.AtomicLevel) *zap.Logger {
	encoding := zap.NewProductionEncoderConfig()
	encoding.TimeKey = "time"
	encoding.EncodeTime = zapcore.RFC3339NanoTimeEncoder
	encoding.EncodeDuration = zapcore.SecondsDurationEncoder
	core := zapcore.NewCore(zapcore.NewJSONEncoder(encoding), zapcore.Lock(zapcore.AddSync(out)), level)
	return zap.New(core)
}

// Level reads a level's name; one that is unknown is info.
func Level(name string) zapcore.Level {
	level, _ := zapcore.ParseLevel(name) // with an error it is info
	return level
}
