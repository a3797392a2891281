package daemon

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/crust-proxy/crust-proxy/internal/daemon/config"
)

// TestABadFileKeepsTheOldRules and says so loudly.
func TestABadFileKeepsTheOldRules(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	write := func(rules string) {
		if err := os.WriteFile(file, []byte("policy: {rules: "+rules+"}\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("[{name: old, drivers: [lvm], defer: true}]")
	s, logs := settingsOf(t, file)
	cfg := s.get()
	for _, bad := range []string{
		"[{name: new, defer: maybe}]", "[{name: new}]", "[{name: a, defer: true}, {name: b, defer: true}]", "[", "[{nam: x}]",
	} {
		write(bad)
		s.reload()
		if got := s.get(); got != cfg || len(got.Policy.Rules) != 1 || got.Policy.Rules[0].Name != "old" {
			t.Errorf("%s: in force is %+v", bad, got.Policy)
		}
		if told := logs.TakeAll(); len(told) != 1 || told[0].Level != zapcore.ErrorLevel {
			t.Errorf("%s: told %+v", bad, told)
		}
	}
}

// settingsOf reads a file as the daemon does at its start.
func settingsOf(t *testing.T, file string) (*settings, *observer.ObservedLogs) {
	t.Helper()
	set := pflag.NewFlagSet("test", pflag.ContinueOnError)
	flags := config.AddFlags(set)
	if err := set.Parse([]string{"--config", file}); err != nil {
		t.Fatal(err)
	}
	cfg, err := flags.Load()
	if err != nil {
		t.Fatal(err)
	}
	core, logs := observer.New(zapcore.DebugLevel)
	s := &settings{flags: flags, log: zap.New(core), apply: func(*config.Config) {}}
	s.inForce.Store(&cfg)
	return s, logs
}

// TestWhatIsRarelyMeantIsReported at the start and at each reload, not by validate alone.
func TestWhatIsRarelyMeantIsReported(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	write := func(text string) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("policy: {rules: [{name: disks, defer: true}]}\n") // without the front
	s, logs := settingsOf(t, file)
	s.put(s.get())
	reported := func(when string, want int) {
		t.Helper()
		warned, found := logs.FilterLevelExact(zapcore.WarnLevel).All(), s.findings()
		logs.TakeAll()
		if len(warned) != want || len(found) != want || want > 0 && (!strings.Contains(found[0], "front.enabled is false") ||
			!strings.Contains(fmt.Sprint(warned[0].ContextMap()), "front.enabled is false")) {
			t.Errorf("%s: log %v, findings %q", when, warned, found)
		}
	}
	reported("at the start", 1)
	write("policy: {rules: [{name: others, defer: true}]}\n")
	s.reload()
	reported("after a reload", 1)
	write("{}\n")
	s.reload()
	reported("after it was mended", 0)
}
