// Package driver is crust-proxy's reference CSI driver: docs/crust-runc.md says what it does.
//
// Its state is in two places only: one record file for each volume in the data directory, and the kernel (which loop
// device is over which image, what is mounted where). Nothing is kept in memory, so the driver may be killed at any
// point; when the same call is repeated, it completes the missing steps. A step is recorded before it is done, and the
// record is removed after the step was undone.
//
// Changed blocks are found by comparing the extents of two snapshots: an extent at the same place of the disk in both
// has not changed. Nothing is tracked, so no change is lost when a snapshot in between is deleted.
package driver

import (
	"context"
	"errors"
	"net"
	"os"
	"path"
	"path/filepath"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	"k8s.io/mount-utils"

	"github.com/crust-proxy/crust-proxy/internal/disk/mkfs"
	"github.com/crust-proxy/crust-proxy/internal/ground/peercred"
	"github.com/crust-proxy/crust-proxy/internal/ground/rpccode"
	"github.com/crust-proxy/crust-proxy/internal/ground/run"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
)

// fileSystems are those that the driver makes; the first is the default.
var fileSystems = []string{"ext4", "xfs", "btrfs"}

// Driver serves CSI's Identity, Controller, GroupController, Node and SnapshotMetadata services.
type Driver struct {
	config     Config
	identity   *identity
	controller *controller
	node       *nodeServer
	groups     *groups
	metadata   *snapshotMetadata
	metrics    *metrics
	// patience is how long calls under way may take once the driver stops: less than the grace period of a pod.
	patience time.Duration
	// release unlocks the data directory.
	release func()
}

// New makes a driver over its data directory, and removes what an earlier life left unfinished. Run ends the driver.
func New(config Config) (_ *Driver, err error) {
	if err := config.validate(); err != nil {
		return nil, err
	}
	release, err := lockDataDir(config.DataDir)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			release()
		}
	}()
	disks, err := openPool(config)
	if err != nil {
		return nil, err
	}
	boot, err := sys.BootID()
	if err != nil {
		return nil, err
	}
	formatter := mkfs.New(mkfs.Config{Log: config.Log, LockFile: filepath.Join(config.DataDir, "format.lock")})
	fs := &filesystems{pool: disks, formatter: formatter, mounter: mount.New(""), mayGrowMounted: fsops.MayGrowMounted}
	freezes, notFreezes := newFreezer(config, boot)
	reflinks, notTried := hasReflinks(config.DataDir)
	clones := &cloner{pool: disks, freezer: freezes, reflinks: reflinks, limit: config.CopyLimit}
	calls, counts := new(locks), newMetrics()
	kept := &groups{locks: calls, pool: disks, cloner: clones, store: store{dir: filepath.Join(config.DataDir, "groups"), spare: disks.store.spare}}
	if err := errors.Join(notFreezes, notTried, os.MkdirAll(kept.store.dir, 0o700), kept.sweep(), disks.sweep()); err != nil {
		return nil, err
	}
	return &Driver{
		config: config, patience: 20 * time.Second, identity: &identity{config: config, pool: disks, snapshots: clones.able()},
		controller: &controller{config: config, locks: calls, pool: disks, cloner: clones},
		node:       &nodeServer{config: config, boot: boot, locks: calls, pool: disks, fs: fs},
		groups:     kept,
		metadata: &snapshotMetadata{
			config: config, locks: calls, pool: disks, reflinks: clones.reflinks, metrics: counts,
			slots: make(chan struct{}, mostStreams), free: newBuffers(), stopping: make(chan struct{}),
		},
		metrics: counts,
		release: release,
	}, nil
}

// Run serves until ctx ends, and then waits for the calls in progress. One that takes too long is cut off.
func (d *Driver) Run(ctx context.Context) error {
	defer d.release()
	// Before the registration: kubelet calls the driver at once.
	socket := pathOf(d.config.Endpoint)
	if err := os.MkdirAll(filepath.Dir(socket), 0o750); err != nil {
		return err
	}
	listener, err := peercred.Listen(socket, 0o600, "")
	if err != nil {
		return err
	}
	group := run.New(ctx)
	group.Go("csi", func(ctx context.Context) error { return d.serve(ctx, listener) })
	metrics := &telemetry.Server{
		Listen: d.config.MetricsListen, Metrics: d.metrics.registry, Log: d.config.Log,
		Ready: func() error { _, err := d.identity.Probe(ctx, nil); return err },
	}
	group.Go("metrics", metrics.Run)
	group.Go("thaw", d.controller.cloner.freezer.thawLeft)
	if d.config.RegistrationSocket != "" {
		group.Go("registration", d.register)
	}
	return group.Wait()
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
		run.Drain(server, d.patience, func() { d.config.Log.Warn("some calls did not end in time and are cut off") })
	})
	defer stop()
	d.config.Log.Info("serving", zap.String("driver", d.config.Name), zap.String("version", sys.Version()),
		zap.String("endpoint", d.config.Endpoint), zap.Bool("defer", d.config.Defer),
		zap.Bool("reflinks", d.controller.cloner.reflinks))
	err := server.Serve(listener)
	if ctx.Err() != nil {
		<-drained
		return nil
	}
	return errors.Join(err, listener.Close())
}

type identity struct {
	csi.UnimplementedIdentityServer

	config Config
	pool   *pool
	// snapshots: the driver can make snapshots, and so serves groups and changed blocks.
	snapshots bool
}

func (i *identity) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: i.config.Name, VendorVersion: sys.Version()}, nil
}

func (i *identity) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (*csi.GetPluginCapabilitiesResponse, error) {
	service := func(kind csi.PluginCapability_Service_Type) *csi.PluginCapability {
		return &csi.PluginCapability{Type: &csi.PluginCapability_Service_{Service: &csi.PluginCapability_Service{Type: kind}}}
	}
	reply := &csi.GetPluginCapabilitiesResponse{Capabilities: []*csi.PluginCapability{
		service(csi.PluginCapability_Service_CONTROLLER_SERVICE),
		service(csi.PluginCapability_Service_VOLUME_ACCESSIBILITY_CONSTRAINTS),
		{Type: &csi.PluginCapability_VolumeExpansion_{VolumeExpansion: &csi.PluginCapability_VolumeExpansion{
			Type: csi.PluginCapability_VolumeExpansion_ONLINE,
		}}},
	}}
	if i.snapshots {
		reply.Capabilities = append(reply.Capabilities, service(csi.PluginCapability_Service_GROUP_CONTROLLER_SERVICE),
			service(csi.PluginCapability_Service_SNAPSHOT_METADATA_SERVICE))
	}
	return reply, nil
}

// Probe checks that images can be written and loop devices attached.
func (i *identity) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	if err := unix.Access(i.pool.images, unix.W_OK); err != nil {
		return nil, status.Errorf(codes.FailedPrecondition, "the data directory %s: %v", i.config.DataDir, err)
	}
	if _, err := os.Stat("/dev/loop-control"); err != nil {
		return nil, status.Errorf(codes.FailedPrecondition, "no loop devices: %v; load the kernel's module loop", err)
	}
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(true)}, nil
}

// logCalls logs each call, but never its request, which may hold secrets. It also turns classed errors into codes.
func (d *Driver) logCalls(ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	began := time.Now()
	reply, err := handle(ctx, req)
	err = coded(err)
	var fields []zap.Field
	if named, ok := req.(interface{ GetVolumeId() string }); ok {
		fields = append(fields, zap.String("volume", named.GetVolumeId()))
	}
	d.logCall(info.FullMethod, began, err, fields...)
	if err != nil {
		return nil, err
	}
	return reply, nil
}

// logStreams is logCalls for calls that stream their answer. It also counts them.
func (d *Driver) logStreams(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	began, end := time.Now(), d.metrics.begin(info.FullMethod)
	err := coded(handle(srv, stream))
	end(status.Code(err))
	d.logCall(info.FullMethod, began, err)
	return err
}

// coded turns an error into one with a code, which is RESOURCE_EXHAUSTED if a disk is full.
func coded(err error) error {
	if _, has := status.FromError(err); !has && volume.DiskKind(err) == volume.Exhausted {
		return status.Error(codes.ResourceExhausted, err.Error())
	}
	return rpccode.Status(err)
}

// afterUndo returns the error of a call whose steps were undone. If undoing failed too,
// something is left, and the code is ABORTED: the caller repeats the call, or undoes it.
func afterUndo(err, undo error) error {
	if undo == nil {
		return err
	}
	return status.Error(codes.Aborted, errors.Join(err, undo).Error())
}

// notUndone returns the error of a call that leaves things behind, its own or those of an earlier call: the code is
// ABORTED, because after a final one kubelet undoes nothing.
func notUndone(err error) error { return status.Error(codes.Aborted, status.Convert(err).Message()) }

func (d *Driver) logCall(method string, began time.Time, err error, fields ...zap.Field) {
	level, message := zap.DebugLevel, "call"
	if err != nil {
		level, message = zap.WarnLevel, "call failed"
	}
	d.config.Log.Log(level, message, append(fields, zap.String("method", path.Base(method)), zap.Stringer("code", status.Code(err)),
		zap.Duration("took", time.Since(began)), zap.Error(err))...)
}

// metrics are the metrics of the streams of changed and allocated blocks.
type metrics struct {
	registry  *prometheus.Registry
	underWay  *prometheus.GaugeVec
	ended     *prometheus.CounterVec
	durations *prometheus.HistogramVec
	bytes     *prometheus.CounterVec
}

func newMetrics() *metrics {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	auto := promauto.With(registry)
	return &metrics{
		registry: registry,
		underWay: auto.NewGaugeVec(prometheus.GaugeOpts{
			Name: "crust_driver_metadata_streams", Help: "Streams of allocated and changed blocks under way.",
		}, []string{"method"}),
		ended: auto.NewCounterVec(prometheus.CounterOpts{
			Name: "crust_driver_metadata_streams_total", Help: "Streams that have ended, by gRPC code.",
		}, []string{"method", "code"}),
		durations: auto.NewHistogramVec(prometheus.HistogramOpts{
			Name: "crust_driver_metadata_stream_duration_seconds", Help: "Time that streams took.",
			Buckets: []float64{.001, .01, .1, 1, 10, 60, 600, 3600}, // from the listing of extents to the comparison of a whole disk
		}, []string{"method"}),
		bytes: auto.NewCounterVec(prometheus.CounterOpts{
			Name: "crust_driver_metadata_bytes_total", Help: "Bytes of the blocks that streams have named.",
		}, []string{"method"}),
	}
}

// begin counts a stream that begins. The caller calls end with its code.
func (m *metrics) begin(fullMethod string) (end func(codes.Code)) {
	method, began := path.Base(fullMethod), time.Now()
	m.underWay.WithLabelValues(method).Inc()
	return func(code codes.Code) {
		m.underWay.WithLabelValues(method).Dec()
		m.ended.WithLabelValues(method, code.String()).Inc()
		m.durations.WithLabelValues(method).Observe(time.Since(began).Seconds())
	}
}

func (m *metrics) named(stream context.Context, bytes int64) {
	fullMethod, _ := grpc.Method(stream)
	m.bytes.WithLabelValues(path.Base(fullMethod)).Add(float64(bytes))
}

// againAfter is the wait after a refusal. kubelet tries a socket only once, so that it has to be made anew.
const againAfter = time.Second

// register registers the driver with kubelet, as the sidecar node-driver-registrar does, until ctx ends.
func (d *Driver) register(ctx context.Context) error {
	for {
		if err := d.offer(ctx); err != nil || !sys.Sleep(ctx, againAfter) {
			return err
		}
	}
}

// offer serves the registration socket until ctx ends or kubelet refuses.
func (d *Driver) offer(ctx context.Context) error {
	listener, err := peercred.Listen(d.config.RegistrationSocket, 0o600, "")
	if err != nil {
		return err
	}
	ctx, end := context.WithCancel(ctx)
	defer end()
	server := grpc.NewServer()
	registration.RegisterRegistrationServer(server, &registrationServer{driver: d, refused: end})
	defer context.AfterFunc(ctx, server.Stop)()
	if err := server.Serve(listener); ctx.Err() == nil {
		return err
	}
	return nil
}

type registrationServer struct {
	registration.UnimplementedRegistrationServer

	driver  *Driver
	refused func()
}

func (a *registrationServer) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	config := a.driver.config
	return &registration.PluginInfo{
		Type: registration.CSIPlugin, Name: config.Name, Endpoint: config.KubeletEndpoint, SupportedVersions: []string{"1.0.0"},
	}, nil
}

func (a *registrationServer) NotifyRegistrationStatus(_ context.Context, s *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	if s.GetPluginRegistered() {
		a.driver.config.Log.Info("registered")
	} else {
		a.driver.config.Log.Error("kubelet refused the driver; registering again", zap.String("reason", s.GetError()), zap.Duration("in", againAfter))
		a.refused()
	}
	return &registration.RegistrationStatusResponse{}, nil
}
