package daemon

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/internal/config"
	"github.com/crust-proxy/crust-proxy/internal/observe"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// reloadOnSignal reads the configuration again at each SIGHUP.
func (d *daemon) reloadOnSignal(ctx context.Context) error {
	hangups := make(chan os.Signal, 1)
	signal.Notify(hangups, syscall.SIGHUP)
	defer signal.Stop(hangups)
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-hangups:
			d.reload()
		}
	}
}

// reload puts in force what can be; a bad file changes nothing.
func (d *daemon) reload() {
	next, err := d.flags.Load()
	if err == nil && d.cfg.Load().Front.Enabled {
		err = mayLeave(&next)
	}
	d.setBadConfig(err)
	if err != nil {
		d.log.Error("the changed configuration is bad; the old one stays in force", zap.Error(err))
		return
	}
	applied, needRestart := config.Reloadable(*d.cfg.Load(), next)
	d.cfg.Store(&applied)
	d.level.SetLevel(observe.Level(applied.Log.Level))
	d.runtimeCallers.SetPolicy(callers(applied.Authorization.Runtime))
	d.adminCallers.SetPolicy(callers(applied.Authorization.Admin))
	if d.front != nil {
		d.csiCallers.SetPolicy(callers(applied.Authorization.CSI))
		d.front.SetPolicy(applied.Policy.Deferral())
	}
	d.broker.SetDevices(devicePolicy(&applied))
	d.relay.SetLimits(relayLimits(&applied))
	d.log.Info("configuration reloaded", zap.Strings("needs_restart", needRestart))
}

// shownConfig is the configuration in force, for the Admin API.
func (d *daemon) shownConfig() (path, yaml string) {
	text, err := d.cfg.Load().YAML()
	if err != nil {
		text = "# cannot be shown: " + err.Error()
	}
	return d.flags.File, text
}

// findings are what is wrong on the node as the daemon sees it.
func (d *daemon) findings() []string {
	var out []string
	for _, problem := range d.broker.Problems() {
		out = append(out, problem.Error())
	}
	if d.tracker != nil && !d.tracker.Ready() {
		out = append(out, fmt.Sprintf("sandboxes cannot be followed (%v): those of runtime-rs are not found", d.tracker.LastError()))
	}
	out = append(out, d.clusterFindings()...)
	if bad := d.badConfig.Load(); bad != nil {
		out = append(out, fmt.Sprintf("the configuration file is bad, and what was in force before it stays: %v", *bad))
	}
	if d.drivers != nil {
		for _, problem := range d.drivers.Bypassed() {
			out = append(out, problem)
		}
		out = append(out, d.driversAway()...)
	}
	for _, status := range d.broker.List() {
		points, err := deferral.HostMounts(status.Volume)
		if err == nil && len(points) > 0 {
			out = append(out, fmt.Sprintf("volume %s: its device %s is mounted on the host at %s: unmount it",
				status.Target, status.Device.Path, strings.Join(points, ", ")))
		}
	}
	return out
}

// setBadConfig remembers what is wrong with the file, for doctor to say until it
// is put right.
func (d *daemon) setBadConfig(err error) {
	if err == nil {
		d.badConfig.Store(nil)
		return
	}
	d.badConfig.Store(&err)
}
