package daemon

import (
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"github.com/crust-proxy/crust-proxy/internal/daemon/admin"
	"github.com/crust-proxy/crust-proxy/internal/daemon/config"
	csifront "github.com/crust-proxy/crust-proxy/internal/front/csi"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/front/passthrough"
	"github.com/crust-proxy/crust-proxy/internal/front/pods"
	"github.com/crust-proxy/crust-proxy/internal/front/registry"
	"github.com/crust-proxy/crust-proxy/internal/ground/peercred"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// registrationGrace is how long a driver may take to register again after a restart of the
// daemon, before its registration with kubelet is removed.
const registrationGrace = 30 * time.Second

type driverFront struct {
	front   *csifront.Front
	drivers *registry.Registry
	callers *peercred.Authorizer
	calls   telemetry.Interceptors // the settings that all servers share
	volumes func() iter.Seq[deferral.Status]
	cluster *pods.Cluster // nil if no cluster is configured
}

// newFront returns nil if the front is off.
func (d *daemon) newFront(cfg *config.Config) (*driverFront, error) {
	if !cfg.Front.Enabled {
		return nil, nil
	}
	calls := *d.sandboxes
	calls.Missing = volume.NoSandbox // as if there were no sandbox
	made := d.settings.flags.Accepted
	if made != "" {
		made = filepath.Join(filepath.Dir(made), "marks-made")
	}
	refused := refusal.NewList(volumeObserver{d})
	front, err := csifront.New(csifront.Config{
		Volumes: d.broker, Pods: podSource(d.cluster), Sandboxes: &calls, Disks: d.disks, Refusals: refused,
		StateDir: cfg.StateDir(), KubeletRoot: cfg.KubeletRoot, PrivateDir: cfg.Front.PrivateDir, MarksDir: cfg.Front.MarksDir,
		DefaultFSType: cfg.Front.DefaultFSType, VolumeCondition: cfg.Front.VolumeCondition, DriverTimeout: cfg.Front.DriverTimeout,
		MarksMade: made, DefaultHandler: cfg.Handlers.Default, Policy: cfg.DeferralPolicy(), Log: d.log.Named("front"),
	})
	if err != nil {
		return nil, err
	}
	d.node.Refusals = refused
	f := &driverFront{
		front: front, volumes: d.broker.Each, cluster: d.cluster,
		calls:   telemetry.Interceptors{Log: d.log, Metrics: d.metrics, Tracer: d.tracer, Ended: d.history.Call},
		callers: peercred.NewAuthorizer("authorization.csi", peercred.Policy(cfg.Authorization.CSI), d.denied),
	}
	behind := registry.Config{
		Registry: cfg.Front.Registry, KubeletRegistry: cfg.Front.KubeletRegistry, Sockets: cfg.CSISockets(),
		Grace: registrationGrace, Patience: cfg.ShutdownTimeout, Log: d.log.Named("registry"), Self: os.Getpid(),
		Front: f, Metrics: d.metrics,
	}
	if d.cluster != nil {
		behind.CSINode = d.cluster
	}
	f.drivers = registry.New(behind)
	return f, nil
}

// ServerOptions are those of the server that stands in for a driver.
func (f *driverFront) ServerOptions(name string, has *csi.NodeGetCapabilitiesResponse, conn grpc.ClientConnInterface) []grpc.ServerOption {
	calls := f.calls
	calls.Front = &telemetry.Front{Driver: name, Known: passthrough.UnaryMethods(), Ours: csifront.Answered()}
	options := append(f.callers.ServerOptions(), calls.Options()...)
	return append(options, f.front.Driver(name, has, conn).ServerOptions()...)
}

func (f *driverFront) Deferred(driver string) (targets []string) {
	for status := range f.volumes() {
		if status.Driver == driver {
			targets = append(targets, status.Target)
		}
	}
	return targets
}

func shown(all []registry.State) []*adminv1.Driver {
	out := make([]*adminv1.Driver, 0, len(all))
	for _, one := range all {
		if one.Missing && one.Problem == "" {
			one.Problem = registry.NotInNode
		}
		mode := volume.WayBlock
		if slices.Contains(one.Capabilities, "DEFER_FS_OPS") {
			mode = volume.WayNative
		}
		out = append(out, &adminv1.Driver{
			Name: one.Name, Version: one.Version, Endpoint: one.Endpoint, CsiSocket: one.Socket, Capabilities: one.Capabilities,
			Mode: mode, Ready: one.Ready, Problem: one.Problem, Since: admin.Stamp(one.Since), KubeletStatus: one.Kubelet,
			DirectlyRegistered: one.Bypassed, WaitingSince: admin.Stamp(one.Waiting),
		})
	}
	return out
}

// csiNodeFindings reports that the node's CSINode cannot be read. If pods cannot be looked up
// either, there is a finding for that already.
func csiNodeFindings(look pods.State) []string {
	if look.CSINode == nil || len(look.Problems) > 0 {
		return nil
	}
	return []string{fmt.Sprintf("it is not known which drivers are in the node's CSINode: %v: a registration that kubelet loses "+
		"is not renewed; see the rights in docs/front.md", look.CSINode)}
}
