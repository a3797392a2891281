package crust

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// sweeper runs an expiry over one program, which notes how often it was asked and then
// does as the script says.
func sweeper(t *testing.T, script string) (e *expiry, asked func() int, logs *observer.ObservedLogs) {
	t.Helper()
	b := newBench(t, byProgram)
	notes := filepath.Join(b.dir, "asked")
	core, logs := observer.New(zapcore.WarnLevel)
	b.cfg.Programs = []string{b.program(t, "sweeper", `[ -e `+notes+` ] || first=yes; echo "$@" >> `+notes+"; "+script)}
	e = newExpiry(b.cfg, zap.New(core))
	e.late = time.Millisecond
	asked = func() int {
		raw, _ := os.ReadFile(notes)
		if n := strings.Count(string(raw), "crust thaw-expired\n"); n*len("crust thaw-expired\n") == len(raw) {
			return n
		}
		t.Errorf("it was asked %q", raw)
		return -1
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { e.run(ctx) })
	t.Cleanup(func() { cancel(); running.Wait() })
	return e, asked, logs
}

// What is frozen for too long is asked for at the start, when the program says so, and
// after the end of each freeze.
func TestExpiredFreezesAreAskedFor(t *testing.T) {
	e, asked, logs := sweeper(t, `[ "$first" = yes ] || { echo '{}'; exit; }; echo '{"thawed":["abc"],"next_seconds":1}'`)
	check.Eventually(t, "asked at the start, and again", func() bool { return asked() == 2 })
	if all := logs.FilterMessageSnippet("has been thawed").All(); len(all) != 1 || all[0].ContextMap()["key"] != "abc" {
		t.Errorf("the log says %v", logs.All())
	}
	e.frozen(time.Hour)
	e.frozen(time.Millisecond)
	check.Eventually(t, "asked after a freeze", func() bool { return asked() == 3 })
}

// A program that cannot do it is not asked in vain, and one that fails is told of.
func TestProgramsThatThawNothing(t *testing.T) {
	for script, problem := range map[string]string{
		"exit 2":                       "",
		"exit 4":                       "",
		"echo '{}'":                    "",
		"echo no luck >&2; exit 1":     "no luck",
		"exit 1":                       "status 1 and no reason",
		"yes":                          "65536",
		"echo '{'":                     "cannot be read",
		`echo '{"problem":"no luck"}'`: "no luck",
	} {
		_, asked, logs := sweeper(t, script)
		check.Eventually(t, script, func() bool { return asked() == 1 && (problem == "" || logs.Len() == 1) })
		if problem == "" && logs.Len() > 0 || problem != "" && !strings.Contains(fmt.Sprint(logs.All()[0].ContextMap()["error"]), problem) {
			t.Errorf("%s: the log says %v", script, logs.All())
		}
	}
}
