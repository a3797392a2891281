package telemetry

import (
	"errors"
	"os"
	"sync"
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
// wait for journald or for a container runtime. The file is not made non-blocking: other processes share that.
type sink struct {
	file    *os.File
	encoder zapcore.Encoder

	mu      sync.Mutex
	dropped int
	torn    bool // the first of those was written in part
}

// Write drops what it cannot write, without an error: zap would write that to stderr, which may be this file.
func (s *sink) Write(line []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.dropped > 0 && !s.reportDropped() {
		s.dropped++
		return len(line), nil
	}
	s.dropped = 0
	if n := s.write(line); n < len(line) {
		s.dropped, s.torn = 1, n > 0
	}
	return len(line), nil
}

// reportDropped logs how many lines were dropped, if somebody reads that.
func (s *sink) reportDropped() bool {
	entry := zapcore.Entry{Level: zap.WarnLevel, Time: time.Now(), Message: "lines of the log were dropped, because nobody read it"}
	line, err := s.encoder.EncodeEntry(entry, []zap.Field{zap.Int("lines", s.dropped)})
	if err != nil {
		return false
	}
	defer line.Free()
	text := line.Bytes()
	if s.torn {
		text = append([]byte("\n"), text...)
	}
	return s.write(text) == len(text)
}

// write returns how much of the text was written.
func (s *sink) write(text []byte) (n int) {
	for n < len(text) && sys.OnFD(s.file, s.awaitReader) == nil {
		wrote, err := s.file.Write(text[n:min(len(text), n+pipeBuf)])
		if n += wrote; err != nil {
			break
		}
	}
	return n
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

// Sync is for a log that is a file.
func (s *sink) Sync() error { return s.file.Sync() }
