package daemon

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/trace"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sync/singleflight"

	"github.com/crust-proxy/crust-proxy/internal/daemon/admin"
	"github.com/crust-proxy/crust-proxy/internal/daemon/config"
	"github.com/crust-proxy/crust-proxy/internal/daemon/history"
	"github.com/crust-proxy/crust-proxy/internal/daemon/sandboxes"
	"github.com/crust-proxy/crust-proxy/internal/disk/mkfs"
	"github.com/crust-proxy/crust-proxy/internal/disk/ondisk"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
	"github.com/crust-proxy/crust-proxy/internal/front/kubelet"
	"github.com/crust-proxy/crust-proxy/internal/front/pods"
	"github.com/crust-proxy/crust-proxy/internal/front/registry"
	"github.com/crust-proxy/crust-proxy/internal/ground/openers"
	"github.com/crust-proxy/crust-proxy/internal/ground/peercred"
	"github.com/crust-proxy/crust-proxy/internal/ground/run"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/internal/ground/systemd"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/sandbox"
	"github.com/crust-proxy/crust-proxy/pkg/stats"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// daemon connects the parts, which know each other only through it.
type daemon struct {
	settings *settings
	log      *zap.Logger
	level    zap.AtomicLevel
	// deniedLog is rate-limited: callers that are refused must not be able to fill the log.
	deniedLog *zap.Logger
	metrics   *telemetry.Metrics
	tracer    trace.Tracer
	notify    *systemd.Notifier
	passed    *systemd.Inherited

	handlers  sandboxes.Handlers
	tracker   tracker // nil if no container runtime is configured
	broker    *deferral.Broker
	http      *telemetry.Server
	sandboxes *sandboxes.Sandboxes
	disks     *disks
	hub       *admin.Hub
	history   *history.History
	node      *admin.Node
	parts     parts
	mounted   *hostMounts
	openers   *openers.Finder
	front     *driverFront  // nil if the front is off
	cluster   *pods.Cluster // nil if no cluster is configured
	podEvents *pods.Events  // nil if none are posted

	runtimeCallers *peercred.Authorizer
	adminCallers   *peercred.Authorizer
	ready          atomic.Bool
	aliveCheck     singleflight.Group
	started        time.Time
	stopping       chan struct{}

	failingMu sync.Mutex
	failing   map[string]int64 // how often in a row a repair has failed, by volume, action and error
}

// start completes the daemon, and runs it until it ends.
func (d *daemon) start(ctx context.Context) error {
	cfg := d.settings.get()
	d.settings.apply = d.apply
	d.disks = &disks{reader: ondisk.New(), formatter: mkfs.New(mkfs.Config{
		Log: d.log.Named("format"), LockFile: filepath.Join(cfg.RunDir, "format.lock"), AcceptLeftovers: cfg.Front.AcceptLeftovers,
	})}
	d.http = &telemetry.Server{
		Listen: cfg.HTTP.Listen, Metrics: d.metrics.Registry, Pprof: cfg.HTTP.Pprof, Ready: d.readiness, Alive: d.alive, Log: d.log,
		Remarks: d.remarks,
	}
	d.deniedLog = d.log.WithOptions(zap.WrapCore(func(core zapcore.Core) zapcore.Core {
		return zapcore.NewSamplerWithOptions(core, time.Second, 5, 0)
	}))
	return d.run(ctx)
}

func (d *daemon) run(ctx context.Context) error {
	cfg := d.settings.get()
	tracer, endTracing, err := telemetry.Tracing{
		Endpoint: cfg.Tracing.Endpoint, Insecure: cfg.Tracing.Insecure, SampleRatio: cfg.Tracing.SampleRatio, Version: sys.Version(), Log: d.log,
	}.Start(ctx)
	if err != nil {
		return err
	}
	defer flushSpans(ctx, endTracing, d.log)
	d.tracer = tracer
	if err := sys.ProbeOpenat2(); err != nil {
		return fmt.Errorf("openat2 does not work, and without it paths cannot be resolved safely: use Linux 5.6 or newer, and remove any "+
			"seccomp filter that refuses the call (systemd's RestrictSUIDSGID= adds one): %w", err)
	}
	release, err := lockRunDir(ctx, d.log, cfg.RunDir, cfg.KubeletRoot, lockWait)
	if err != nil {
		return err
	}
	defer release()
	if err := leaveFront(d.settings.flags, cfg, d.log); err != nil {
		return err
	}
	if err := d.prepareFront(cfg); err != nil {
		return err
	}
	var observe func(*adminv1.VolumeEvent) // nil if pods are told nothing
	if d.cluster != nil && cfg.Cluster.Events {
		d.podEvents = pods.NewEvents(d.cluster)
		observe = podObserver(d.podEvents.Offer)
	}
	var opening sync.WaitGroup // events are many, and so is what the kernel says about itself
	opening.Go(func() { d.history = history.Open(cfg.StateDir(), observe, d.log) })
	// From here on what systemd passed is used up. With its sockets nothing fails any more because of
	// the configuration, so that a second start, with the accepted one, has them.
	err = d.buildBroker(cfg)
	opening.Wait()
	defer d.history.Close()
	if err != nil {
		return err
	}
	defer d.broker.Close()
	servers, err := d.newServers(cfg)
	if err != nil {
		return err
	}
	defer servers.close(d.passed.Listeners)
	d.settings.settled = true
	if err := d.loadRecords(ctx); err != nil {
		return err
	}
	if err := d.buildFront(cfg); err != nil {
		return err
	}
	return d.serveUntilDone(ctx, servers)
}

// flushSpans ends tracing. It takes a ctx that has ended.
func flushSpans(ctx context.Context, end func(context.Context) error, log *zap.Logger) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Second)
	defer cancel()
	if err := end(ctx); err != nil {
		log.Warn("the last spans were not sent", zap.Error(err))
	}
}

func (d *daemon) buildBroker(cfg *config.Config) error {
	// The callbacks use the handlers and the broker, which are set before the tracker runs.
	d.tracker = newTracker(cfg, sandbox.Config{
		OnAdded: func(podUID, id string) {
			for _, h := range d.handlers {
				h.SandboxAdded(podUID, id)
			}
		},
		OnGone: func(id string) {
			for _, h := range d.handlers {
				h.SandboxGone(id)
			}
		},
		Busy: func() bool { return len(d.broker.After(deferral.Status{Volume: &volume.Volume{}}, 1)) > 0 },
	}, d.log)
	var keeper claim.Keeper // nil if systemd keeps no descriptors
	if d.notify.CanStore() {
		keeper = d.notify
	}
	var err error
	if d.handlers, err = newHandlers(d, cfg); err != nil {
		return err
	}
	projectors := make([]deferral.Projector, len(d.handlers))
	for i, h := range d.handlers {
		projectors[i] = h
	}
	d.openers = newOpeners(d.log)
	d.broker, err = deferral.NewBroker(deferral.Config{
		StateDir: cfg.StateDir(), Root: cfg.KubeletRoot, Notice: kubelet.GuardNotice, Describe: kubelet.Describe, Devices: claim.DevicePolicy(cfg.Devices),
		Handlers: projectors, DefaultHandler: cfg.Handlers.Default,
		Openers: d.openers, Keeper: keeper, Kept: d.passed.Stored, Adopted: d.handlers.Adopted, Preparer: d.disks,
		EndOrphans: cfg.Handlers.Kata.EndOrphans, Observer: volumeObserver{d},
	})
	if err != nil {
		return err
	}
	relay := stats.New(stats.Limits(cfg.Relay), func(v *volume.Volume, call string, took time.Duration, err error) {
		d.metrics.SandboxAsked(v.Handler, call, resultOf(err), took)
	})
	d.sandboxes = &sandboxes.Sandboxes{
		Handlers: d.handlers, Relay: relay, EndGrowth: d.broker.EndGrowth, HasGrown: d.disks.hasGrown,
		Missing: volume.Unsupported,
	}
	d.node = &admin.Node{Broker: d.broker, Sandboxes: d.sandboxes}
	return nil
}

// prepareFront does what can fail because of the front's keys.
func (d *daemon) prepareFront(cfg *config.Config) (err error) {
	if !cfg.Front.Enabled {
		return nil
	}
	if d.cluster, err = newCluster(cfg, d.metrics, d.log.Named("cluster")); err != nil {
		return err
	}
	return registry.Config{Registry: cfg.Front.Registry, Sockets: cfg.CSISockets()}.MakeDirs()
}

// buildFront builds what depends on the records: front, status.
func (d *daemon) buildFront(cfg *config.Config) (err error) {
	staged, badFront := staging.StagedDevices(cfg.StateDir())
	onRecord := &volumes{node: d.node, notify: d.notify, badFront: badFront, staged: func() []staging.Staged { return staged }}
	if d.front, err = d.newFront(cfg); err != nil {
		return err
	}
	d.mounted = &hostMounts{volumes: d.broker.Each}
	d.parts = parts{d.settings, onRecord}
	if d.tracker != nil {
		d.parts = append(d.parts, followed{d.tracker})
	}
	if d.cluster != nil {
		d.parts = append(d.parts, lookups{d.cluster})
	}
	d.parts = append(d.parts, devices{d.openers, d.broker}, address{d.http})
	if d.front != nil {
		onRecord.staged = d.front.front.StagedDevices
		d.parts = append(d.parts, d.front)
	}
	d.metrics.WatchNode(d.parts.state)
	return nil
}

// remarks are shown by /readyz.
func (d *daemon) remarks() []string {
	if d.cluster == nil {
		return nil
	}
	return lookups{d.cluster}.problems()
}

// loadRecords reads the records and repairs the node before anything is served.
func (d *daemon) loadRecords(ctx context.Context) error {
	start := time.Now()
	for _, h := range d.handlers {
		h.AdoptForeign()
	}
	if err := d.broker.Load(ctx); err != nil {
		return err
	}
	for known := range d.broker.Each() {
		d.metrics.Deferred(known.Driver, known.Handler)
	}
	for _, problem := range d.broker.Problems() {
		d.log.Error("a record cannot be used", zap.Error(problem))
	}
	report, err := d.Reconcile(ctx)
	if err != nil {
		return err
	}
	d.log.Info("volumes taken up", zap.Int("volumes", report.Checked), zap.Int("repairs", len(report.Repairs)),
		zap.Duration(telemetry.FieldDuration, time.Since(start)))
	return nil
}

func (d *daemon) serveUntilDone(ctx context.Context, servers *servers) error {
	d.http.Bind(ctx) // before the daemon reports that it is ready
	group := run.New(ctx)
	for _, h := range d.handlers {
		group.Go(h.Name(), h.Run)
	}
	if d.tracker != nil {
		group.Go("containerd", d.tracker.Run)
	}
	group.Go("http", d.http.Run)
	group.Go("reconcile", d.reconcileRegularly)
	group.Go("configuration", d.settings.run)
	group.Go("watchdog", (&systemd.Watchdog{Notifier: d.notify, Alive: d.alive, Log: d.log}).Run)
	if d.front != nil {
		group.Go("drivers", d.front.drivers.Run)
	}
	if d.cluster != nil {
		group.Go("cluster", d.cluster.Run)
	}
	if d.podEvents != nil {
		group.Go("events of pods", d.podEvents.Run)
	}
	servers.start(group, d)
	d.ready.Store(true)
	if err := d.notify.Ready(); err != nil {
		d.log.Warn("systemd was not notified", zap.Error(err))
	}
	d.log.Info("serving", zap.String("version", sys.Version()))
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	time.AfterFunc(time.Second, debug.FreeOSMemory) // the start needs much more memory than the rest
	return group.Wait()
}

// gcPercent makes less of the node's memory the daemon's garbage than Go's 100. What it then costs is little: the
// daemon computes seldom.
const gcPercent = 50

func (d *daemon) reconcileRegularly(ctx context.Context) error {
	interval := d.settings.get().ReconcileInterval
	if interval <= 0 {
		<-ctx.Done()
		return nil
	}
	for sys.Sleep(ctx, interval) {
		if _, err := d.Reconcile(ctx); err != nil && ctx.Err() == nil {
			d.log.Error("reconcile failed", zap.Error(err))
		}
	}
	return nil
}

// Reconcile compares all records with the node, and logs what was repaired, and rarely what fails again and again.
func (d *daemon) Reconcile(ctx context.Context) (deferral.ReconcileReport, error) {
	report, err := d.broker.Reconcile(ctx)
	d.failingMu.Lock()
	defer d.failingMu.Unlock()
	before := d.failing
	d.failing = make(map[string]int64)
	if err != nil { // not all were looked at
		maps.Copy(d.failing, before)
	}
	for _, repair := range report.Repairs {
		d.metrics.Repaired(repair.Action, repair.Err == nil)
		if repair.Volume.Key != "" {
			d.history.Did(repair.Volume, history.Repaired, "reconcile", repair.Action, repair.Err)
		}
		fields := append(about(repair.Volume), zap.String(telemetry.FieldAction, repair.Action))
		if repair.Err == nil {
			d.log.Info("repaired", fields...)
			continue
		}
		of := string(repair.Volume.Key) + " " + repair.Action + ": " + repair.Err.Error()
		d.failing[of] = before[of] + 1
		if times := d.failing[of]; sys.Rarely(times) {
			d.log.Error("repair failed", append(fields, zap.Error(repair.Err), zap.Int64("times", times))...)
		}
	}
	return report, err
}

func (d *daemon) readiness() error {
	if !d.ready.Load() {
		return fmt.Errorf("not serving yet, or not any more")
	}
	return nil
}

// alive reports whether the core answers. systemd's watchdog and, in a DaemonSet, kubelet's probe restart a daemon
// whose core is stuck. Its locks are tried by one goroutine at a time, which never ends then.
func (d *daemon) alive(ctx context.Context) error {
	answered := d.aliveCheck.DoChan("", func() (any, error) {
		d.broker.Get("")
		d.broker.Users().OffRecord("")
		return struct{}{}, nil
	})
	select {
	case <-answered:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("the table of volumes does not answer: %w", ctx.Err())
	}
}

// onSandboxChanged is called by a handler when the sandbox of a volume changed: the last
// answers of the old one do not apply to the new one.
func (d *daemon) onSandboxChanged(key volume.Key) {
	if d.sandboxes != nil {
		binding, _ := d.handlers.Binding(&volume.Volume{Key: key})
		d.sandboxes.Relay.Rebound(key, binding.Sandbox)
		if status, ok := d.broker.Get(key); ok {
			d.history.Bound(status.Volume, binding)
		}
	}
	volumeObserver{d}.Changed(key)
}

// resultOf is the value of the metric label "result".
func resultOf(err error) string {
	if err == nil {
		return "ok"
	}
	return volume.KindOf(err).String()
}

// apply passes on the settings that can be changed without a restart.
func (d *daemon) apply(cfg *config.Config) {
	d.level.SetLevel(telemetry.Level(cfg.Log.Level))
	d.runtimeCallers.SetPolicy(peercred.Policy(cfg.Authorization.Runtime))
	d.adminCallers.SetPolicy(peercred.Policy(cfg.Authorization.Admin))
	if d.front != nil {
		d.front.callers.SetPolicy(peercred.Policy(cfg.Authorization.CSI))
		d.front.front.SetPolicy(cfg.DeferralPolicy())
	}
	d.broker.SetDevices(claim.DevicePolicy(cfg.Devices))
	d.sandboxes.Relay.SetLimits(stats.Limits(cfg.Relay))
}
