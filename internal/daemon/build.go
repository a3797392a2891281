package daemon

import (
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/config"
	"github.com/crust-proxy/crust-proxy/internal/peercred"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/kata"
	"github.com/crust-proxy/crust-proxy/pkg/stats"
)

func (d *daemon) newKata(cfg *config.Config) (*kata.Handler, error) {
	temp, err := kataTemp(cfg)
	if err != nil {
		return nil, err
	}
	settings := kata.Default()
	settings.DirectVolumes = cfg.Handlers.Kata.DirectVolumes
	settings.GoSandboxes = cfg.Handlers.Kata.GoSandboxes
	settings.RustSandboxes = cfg.Handlers.Kata.RustSandboxes
	settings.SharedSandboxes = cfg.Handlers.Kata.SharedSandboxes
	settings.TempDir = temp
	settings.Filesystems = cfg.Handlers.Kata.Filesystems
	settings.OnChange = d.rebound
	settings.DeviceSize = func(v *deferral.Volume) (int64, bool) { return d.broker.DeviceSize(v) }
	var sandboxes kata.Sandboxes
	if d.tracker != nil {
		sandboxes = d.tracker
	}
	return kata.New(settings, sandboxes, d.log.Named("kata"))
}

// kataTemp is where volumes are made ready: in our state directory where that is
// on Kata's filesystem, or else beside Kata's tree. Never in it.
func kataTemp(cfg *config.Config) (string, error) {
	k := cfg.Handlers.Kata
	if k.TempDir != "" {
		return k.TempDir, nil
	}
	ours := filepath.Join(cfg.StateDir(), "tmp", "kata")
	for _, dir := range []string{ours, k.DirectVolumes} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return "", deferral.Errorf(deferral.Internal, "the directory %s cannot be made: %w", dir, err)
		}
	}
	same, err := sameFilesystem(ours, k.DirectVolumes)
	if err != nil || same {
		return ours, err
	}
	return filepath.Join(filepath.Dir(k.DirectVolumes), ".crust-proxy-tmp"), nil
}

func sameFilesystem(a, b string) (bool, error) {
	var x, y unix.Stat_t
	if err := unix.Stat(a, &x); err != nil {
		return false, deferral.Errorf(deferral.Internal, "%s cannot be looked at: %w", a, err)
	}
	if err := unix.Stat(b, &y); err != nil {
		return false, deferral.Errorf(deferral.Internal, "%s cannot be looked at: %w", b, err)
	}
	return x.Dev == y.Dev, nil
}

func devicePolicy(cfg *config.Config) deferral.DevicePolicy {
	return deferral.DevicePolicy{Roots: cfg.Devices.Roots, Images: cfg.Devices.Images, Classes: cfg.Devices.Classes}
}

func relayLimits(cfg *config.Config) stats.Limits {
	return stats.Limits{
		StatsTimeout: cfg.Relay.StatsTimeout.Std(), ExpandTimeout: cfg.Relay.ExpandTimeout.Std(),
		Concurrency: cfg.Relay.Concurrency, SlowAfter: cfg.Relay.SlowAfter.Std(), MaxSlow: cfg.Relay.MaxSlow,
	}
}

func callers(c config.Callers) peercred.Policy {
	return peercred.Policy{UIDs: c.UIDs, GIDs: c.GIDs}
}
