package daemon

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/spf13/pflag"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/crust-proxy/crust-proxy/internal/config"
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
	s := &settings{flags: flags, log: zap.New(core)}
	s.inForce.Store(&cfg)
	for _, bad := range []string{
		"[{name: new, defer: maybe}]", "[{name: new}]", "[{name: a, defer: true}, {name: b, defer: true}]", "[", "[{nam: x}]",
	} {
		write(bad)
		s.reload()
		if got := s.get(); got != &cfg || len(got.Policy.Rules) != 1 || got.Policy.Rules[0].Name != "old" {
			t.Errorf("%s: in force is %+v", bad, got.Policy)
		}
		if told := logs.TakeAll(); len(told) != 1 || told[0].Level != zapcore.ErrorLevel {
			t.Errorf("%s: told %+v", bad, told)
		}
	}
}
