package driver

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/crust-proxy/crust-proxy/internal/ground/peercred"
	"github.com/crust-proxy/crust-proxy/internal/ground/run"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
)

// fileSystems are those that the driver makes; the first is the default.
var fileSystems = []string{"ext4", "xfs", "btrfs"}

// Driver serves CSI's Identity, Controller, GroupController, Node and SnapshotMetadata services.
type Driver struct {
	config     Config
	log        *zap.Logger
	identity   *identity
	controller *controller
	node       *nodeServer
	groups     *groupController
	metadata   *snapshotMetadata
	metrics    *metrics
	// patience is how long calls under way may take once the driver stops.
	patience time.Duration
	// release unlocks the data directory.
	release func()
}

// patience is shorter than the grace period of a pod in Kubernetes.
const patience = 20 * time.Second

// New makes a driver over its data directory, which no other one may have, and removes what
// an earlier life had begun to make or to remove. Run ends the driver.
func New(config Config) (*Driver, error) {
	if err := config.validate(); err != nil {
		return nil, err
	}
	release, err := lockDataDir(config.DataDir)
	if err != nil {
		return nil, err
	}
	driver, err := open(config)
	if err != nil {
		release()
		return nil, err
	}
	driver.release = release
	return driver, nil
}

// open makes a driver over a data directory that is locked.
func open(config Config) (*Driver, error) {
	disks, err := openPool(config)
	if err != nil {
		return nil, err
	}
	boot, err := sys.BootID()
	if err != nil {
		return nil, err
	}
	fs := newFilesystems(disks)
	freezes, err := newFreezer(config, boot)
	if err != nil {
		return nil, err
	}
	clones, err := newCloner(disks, freezes)
	if err != nil {
		return nil, err
	}
	kept, err := openGroups(disks, clones)
	if err != nil {
		return nil, err
	}
	calls, counts := new(locks), newMetrics()
	return &Driver{
		config: config, patience: patience, log: config.Log, identity: &identity{config: config, pool: disks, snapshots: clones.able()},
		controller: &controller{config: config, log: config.Log, locks: calls, pool: disks, cloner: clones},
		node:       &nodeServer{config: config, boot: boot, locks: calls, pool: disks, fs: fs},
		groups:     &groupController{locks: calls, groups: kept},
		metadata: &snapshotMetadata{
			config: config, log: config.Log, locks: calls, pool: disks, reflinks: clones.reflinks, metrics: counts,
			slots: make(chan struct{}, mostStreams), free: newBuffers(), stopping: make(chan struct{}),
		},
		metrics: counts,
	}, errors.Join(kept.sweep(), disks.sweep())
}

// Run serves until ctx ends, and then waits for the calls in progress. A call that takes too
// long, such as a stream that nobody reads, is cut off.
func (d *Driver) Run(ctx context.Context) error {
	defer d.release()
	// Before the registration: kubelet calls the driver at once.
	listener, err := d.listen()
	if err != nil {
		return err
	}
	group := run.New(ctx)
	group.Go("csi", func(ctx context.Context) error { return d.serve(ctx, listener) })
	group.Go("metrics", d.serveMetrics)
	group.Go("thaw", d.controller.cloner.freezer.thawLeft)
	if d.config.RegistrationSocket != "" {
		group.Go("registration", d.register)
	}
	return group.Wait()
}

func (d *Driver) listen() (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(d.config.socket()), 0o750); err != nil {
		return nil, err
	}
	return peercred.Listen(d.config.socket(), 0o600, "")
}

// serveMetrics serves metrics and health where --metrics-listen says, until ctx ends.
func (d *Driver) serveMetrics(ctx context.Context) error {
	server := &telemetry.Server{
		Listen: d.config.MetricsListen, Metrics: d.metrics.registry, Log: d.log,
		Ready: func() error { _, err := d.identity.Probe(ctx, nil); return err },
	}
	return server.Run(ctx)
}

func (d *Driver) serve(ctx context.Context, listener net.Listener) error {
	options := []grpc.ServerOption{grpc.ChainUnaryInterceptor(d.logCalls), grpc.ChainStreamInterceptor(d.logStreams)}
	if d.config.Defer {
		options = append(options, csidefer.ServerOption(csidefer.Options{FileSystems: fileSystems}))
	}
	server := grpc.NewServer(options...)
	csi.RegisterIdentityServer(server, d.identity)
	csi.RegisterControllerServer(server, d.controller)
	csi.RegisterNodeServer(server, d.node)
	csi.RegisterGroupControllerServer(server, d.groups)
	csi.RegisterSnapshotMetadataServer(server, d.metadata)
	drained := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(drained)
		close(d.metadata.stopping)
		run.Drain(server, d.patience, func() { d.log.Warn("some calls did not end in time and are cut off") })
	})
	defer stop()
	d.log.Info("serving", zap.String("driver", d.config.Name), zap.String("version", sys.Version()),
		zap.String("endpoint", d.config.Endpoint), zap.Bool("defer", d.config.Defer),
		zap.Bool("reflinks", d.controller.cloner.reflinks))
	err := server.Serve(listener)
	if ctx.Err() != nil {
		<-drained
		return nil
	}
	return errors.Join(err, listener.Close())
}
