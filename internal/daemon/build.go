package daemon

import (
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/config"
	"github.com/crust-proxy/crust-proxy/internal/peercred"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/stats"
)

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
