package telemetry

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestWhatKubernetesLibrariesSay(t *testing.T) {
	core, logs := observer.New(zap.DebugLevel)
	log := Logr(zap.New(core)).WithName("client").WithValues("node", "n", "odd")
	log.V(2).Info("for their developers")
	log.Info("small talk", "count", 3)
	log.Error(errors.New("gone"), "cannot go on", "what", "pods")
	got := logs.AllUntimed()
	check.Require(t, len(got) == 2, "%d entries: %+v", len(got), got)
	check.That(t, got[0].Level == zap.DebugLevel && got[0].Message == "small talk" && got[0].ContextMap()["count"] == int64(3), "got %+v", got[0])
	fields := got[1].ContextMap()
	check.That(t, got[1].Level == zap.WarnLevel && got[1].LoggerName == "client" && fields["error"] == "gone" &&
		fields["what"] == "pods" && fields["node"] == "n", "got %+v", got[1])
}

// TestPrioritiesAreForTheJournal: it reads them from lines that it gets itself, and nobody else does.
func TestPrioritiesAreForTheJournal(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	file := check.Value(os.Create(path))(t)
	defer func() { _ = file.Close() }()
	var st unix.Stat_t
	check.Must(t, unix.Fstat(int(file.Fd()), &st))
	level := zap.NewAtomicLevelAt(zap.DebugLevel)
	t.Setenv("JOURNAL_STREAM", fmt.Sprintf("%d:%d", st.Dev, st.Ino))
	log := NewLogger(file, level).With(zap.String("part", "x"))
	log.Debug("a")
	log.Info("b")
	log.Warn("c")
	log.Error("d")
	t.Setenv("JOURNAL_STREAM", "1:1")
	NewLogger(file, level).Error("e")
	raw := check.Value(os.ReadFile(path))(t)
	var begin []string
	for line := range strings.Lines(string(raw)) {
		first, _, _ := strings.Cut(line, `"`)
		begin = append(begin, first)
		whole := strings.HasSuffix(line, "}\n") && strings.Contains(line, `"e"`) != strings.Contains(line, `"part":"x"`)
		check.That(t, whole, "the line is not whole: %q", line)
	}
	check.Equal(t, strings.Join(begin, " "), "<7>{ <6>{ <4>{ <3>{ {", "the lines begin with")
}

// TestLogThatNobodyReads, as where journald or containerd hangs, stops no call. The next line that is read says so.
func TestLogThatNobodyReads(t *testing.T) {
	socket := func(fds []int) error {
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
		copy(fds, pair[:])
		return err
	}
	for name, c := range map[string]struct {
		open func(fds []int) error
		long int
	}{"a pipe": {unix.Pipe, 10}, "long lines": {unix.Pipe, 20 << 10}, "the journal": {socket, 10}} {
		t.Run(name, func(t *testing.T) {
			const lines = 5000
			fds := make([]int, 2)
			check.Must(t, c.open(fds))
			file := os.NewFile(uintptr(fds[1]), "stderr")
			t.Cleanup(func() { _ = errors.Join(unix.Close(fds[0]), file.Close()) })
			log, ended := NewLogger(file, zap.NewAtomicLevel()), make(chan struct{})
			go func() {
				for range lines {
					log.Info("line", zap.String("text", strings.Repeat("x", c.long)))
				}
				close(ended)
			}()
			select {
			case <-ended:
			case <-time.After(20 * time.Second):
				t.Fatal("whoever logs waits for a reader")
			}
			var read []byte
			check.Must(t, unix.SetNonblock(fds[0], true))
			for range 2 {
				buf := make([]byte, 1<<20)
				for n, _ := unix.Read(fds[0], buf); n > 0; n, _ = unix.Read(fds[0], buf) {
					read = append(read, buf[:n]...)
				}
				log.Info("line")
			}
			whole, torn, dropped := 0, 0, 0
			for raw := range bytes.Lines(read) {
				var line struct {
					Msg   string
					Lines int
				}
				if json.Unmarshal(raw, &line) != nil {
					torn++
				} else if dropped += line.Lines; line.Msg == "line" {
					whole++
				}
			}
			check.That(t, whole+dropped == lines+1 && dropped > 0 && torn <= 1 && bytes.HasSuffix(read, []byte("\"line\"}\n")),
				"of %d lines %d are whole, %d torn and %d dropped, and the last is %q", lines+1, whole, torn, dropped, read[max(0, len(read)-200):])
		})
	}
}
