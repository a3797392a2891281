package telemetry

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

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
	if fields := got[1].ContextMap(); got[1].Level != zap.WarnLevel || got[1].LoggerName != "client" || fields["error"] != "gone" ||
		fields["what"] != "pods" || fields["node"] != "n" {
		t.Errorf("got %+v", got[1])
	}
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
	got := strings.Join(begin, " ")
	check.That(t, got == "<7>{ <6>{ <4>{ <3>{ {", "the lines begin with %s", got)
}
