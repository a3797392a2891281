package telemetry

import (
	"io"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
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
