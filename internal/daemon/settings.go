package daemon

import (
	"context"
	"fmt"
	"os"
	"sync/atomic"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/internal/daemon/config"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/stats"
)

// settings holds the configuration in force. The file may change while the daemon runs.
type settings struct {
	flags *config.Flags
	log   *zap.Logger
	// apply passes a changed configuration to the parts of the daemon.
	apply   func(*config.Config)
	watcher *config.Watcher
	hangups <-chan os.Signal

	inForce atomic.Pointer[config.Config]
	bad     atomic.Pointer[error] // what is wrong with the file since it was changed
}

func (s *settings) get() *config.Config { return s.inForce.Load() }

// put puts a configuration in force, and logs its warnings.
func (s *settings) put(cfg *config.Config) {
	s.inForce.Store(cfg)
	for _, line := range cfg.Warnings() {
		s.log.Warn("the configuration is allowed, and rarely meant", zap.String("problem", line))
	}
}

// findings describes what is wrong with the configuration, for doctor.
func (s *settings) findings() []string {
	var out []string
	if bad := s.bad.Load(); bad != nil {
		out = append(out, fmt.Sprintf("the configuration file is bad, and what was in force before it stays: %v", *bad))
	}
	for _, line := range s.get().Warnings() {
		out = append(out, "the configuration is allowed, and rarely meant: "+line)
	}
	return out
}

func (s *settings) measure(_ context.Context, into *telemetry.NodeState) {
	into.ConfigGood = s.bad.Load() == nil
}

func (s *settings) run(ctx context.Context) error { return s.watcher.Run(ctx, s.hangups, s.reload) }

// reload puts in force what can be changed without a restart. A bad file changes
// nothing, and is a finding of doctor until it is corrected. Only run calls it: of two reloads
// at once, the one that read an older file could be applied last.
func (s *settings) reload() {
	next, err := s.flags.Load()
	if err == nil && s.get().Front.Enabled {
		err = mayLeave(&next)
	}
	if err != nil {
		s.bad.Store(&err)
		s.log.Error("the changed configuration is bad; the old one stays in force", zap.Error(err))
		return
	}
	s.bad.Store(nil)
	applied, needRestart := config.Reloadable(*s.get(), next)
	s.put(&applied)
	s.apply(&applied)
	s.log.Info("configuration reloaded", zap.Strings("needs_restart", needRestart))
}

func (s *settings) shown() (path, yaml string) {
	text, err := s.get().YAML()
	if err != nil {
		text = "# cannot be shown: " + err.Error()
	}
	return s.flags.File, text
}

func relayLimits(cfg *config.Config) stats.Limits {
	return stats.Limits{
		StatsTimeout: cfg.Relay.StatsTimeout.Std(), ExpandTimeout: cfg.Relay.ExpandTimeout.Std(),
		Concurrency: cfg.Relay.Concurrency, SlowAfter: cfg.Relay.SlowAfter.Std(), MaxSlow: cfg.Relay.MaxSlow,
	}
}
