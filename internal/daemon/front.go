package daemon

import (
	"context"
	"path/filepath"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/crust-proxy/crust-proxy/internal/config"
	"github.com/crust-proxy/crust-proxy/internal/observe"
	"github.com/crust-proxy/crust-proxy/internal/peercred"
	"github.com/crust-proxy/crust-proxy/pkg/api"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/format"
	"github.com/crust-proxy/crust-proxy/pkg/front"
	"github.com/crust-proxy/crust-proxy/pkg/front/passthrough"
	"github.com/crust-proxy/crust-proxy/pkg/front/registry"
)

// registrationGrace is how long a driver may take to come back after the daemon
// was restarted, before kubelet is told that it has gone.
const registrationGrace = 30 * time.Second

// preparer makes filesystems on blank devices.
type preparer struct{ *format.Formatter }

func newPreparer(cfg *config.Config, log *zap.Logger) (*preparer, error) {
	formatter, err := format.New(format.Config{Log: log.Named("format"), LockFile: filepath.Join(cfg.RunDir, "format.lock"),
		AcceptLeftovers: cfg.Front.AcceptLeftovers})
	return &preparer{formatter}, err
}

// Prepare looks at a device, and formats it where policy says so.
func (p *preparer) Prepare(ctx context.Context, d deferral.Preparation) error {
	policy := d.Format
	if policy == deferral.FormatGuest && !d.GuestFormats {
		// A sandbox that formats whatever it is given would do so at its second
		// start too.
		policy = deferral.FormatNever
	}
	_, err := p.Formatter.Prepare(ctx, d.Device, d.Target, d.Path, d.FSType, policy, d.ReadOnly)
	return err
}

// buildFront makes the CSI front, where it is on.
func (d *daemon) buildFront() error {
	cfg := d.cfg.Load()
	if !cfg.Front.Enabled {
		return nil
	}
	var err error
	d.front, err = front.New(front.Config{
		Volumes: d.broker, Sandboxes: &sandboxes{handlers: d.node.Handlers, relay: d.relay},
		Pods: d.pods(), StateDir: cfg.StateDir(), KubeletRoot: cfg.KubeletRoot, PrivateDir: cfg.Front.PrivateDir,
		DefaultFSType: cfg.Front.DefaultFSType, DriverTimeout: cfg.Front.DriverTimeout.Std(),
		DefaultHandler: cfg.Handlers.Default, OnRefused: d.volumeRefused, OnChange: d.hub.Changed,
		Policy: cfg.Policy.Deferral(), Log: d.log.Named("front"),
	})
	if err != nil {
		return err
	}
	d.node.Refusals = d.front
	d.csiCallers = peercred.NewAuthorizer("authorization.csi", callers(cfg.Authorization.CSI), d.denied)
	d.drivers = registry.New(registry.Config{
		Registry: cfg.Front.Registry, KubeletRegistry: cfg.Front.KubeletRegistry, Sockets: filepath.Join(cfg.RunDir, "csi"),
		Grace: registrationGrace, Patience: func() time.Duration { return d.cfg.Load().ShutdownTimeout.Std() },
		Log: d.log.Named("registry"), Serve: d.serveDriver,
		Deferred: d.deferredOf,
		Alarm:    d.metrics.DriverBypassed,
	})
	return nil
}

// serveDriver gives the options of the server that stands in for a driver.
func (d *daemon) serveDriver(name string, conn front.Conn) []grpc.ServerOption {
	interceptors := &observe.Interceptors{
		Log: d.log, Metrics: d.metrics, Tracer: d.tracer, Peer: peerOf, Quiet: quietOfDriver(),
		Front: &observe.Front{Driver: name, Known: passthrough.UnaryMethods(), Ours: front.Answered()},
	}
	options := append(d.csiCallers.ServerOptions(), interceptors.Options()...)
	return append(options, d.front.Driver(name, conn).ServerOptions()...)
}

// quietOfDriver are the calls of drivers that are made all the time and change
// nothing.
func quietOfDriver() map[string]bool {
	return map[string]bool{
		csi.Identity_Probe_FullMethodName:           true,
		csi.Identity_GetPluginInfo_FullMethodName:   true,
		csi.Node_NodeGetCapabilities_FullMethodName: true,
		csi.Node_NodeGetVolumeStats_FullMethodName:  true,
		csi.Node_NodeGetInfo_FullMethodName:         true,
		csi.Controller_ListVolumes_FullMethodName:   true,
		csi.Controller_GetCapacity_FullMethodName:   true,
		csi.Controller_ListSnapshots_FullMethodName: true,
	}
}

func (d *daemon) volumeRefused(driver string, party deferral.Party) {
	d.metrics.VolumeRefused(driver, string(party))
}

// deferredOf names the deferred volumes of a driver.
func (d *daemon) deferredOf(driver string) []string {
	var targets []string
	for _, status := range d.broker.List() {
		if status.Driver == driver {
			targets = append(targets, status.Target)
		}
	}
	return targets
}

// shownDrivers is how the drivers stand, for the Admin API.
func (d *daemon) shownDrivers() []api.DriverState {
	all := d.drivers.List()
	out := make([]api.DriverState, 0, len(all))
	for _, one := range all {
		mode := deferral.WayBlock
		if slices.Contains(one.Capabilities, "DEFER_FS_OPS") {
			mode = deferral.WayNative
		}
		out = append(out, api.DriverState{
			Name: one.Name, Version: one.Version, Endpoint: one.Endpoint, CSISocket: one.Socket, Capabilities: one.Capabilities,
			Mode: mode, Ready: one.Ready, Problem: one.Problem, Since: one.Since, KubeletStatus: one.Kubelet,
			DirectlyRegistered: one.Bypassed,
		})
	}
	return out
}
