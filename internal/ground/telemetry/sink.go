package telemetry

import (
	"errors"
	"os"
	"slices"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

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
	if s.write(append(s.reportDropped(), line...)) {
		s.dropped = 0
	} else {
		s.dropped++
	}
	return len(line), nil
}

// reportDropped says how many lines were dropped. The first may have been written in part.
func (s *sink) reportDropped() []byte {
	if s.dropped == 0 {
		return nil
	}
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
