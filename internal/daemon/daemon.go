package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	goruntime "runtime"
	"runtime/debug"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/trace"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/crust-proxy/crust-proxy/internal/cluster"
	"github.com/crust-proxy/crust-proxy/internal/config"
	"github.com/crust-proxy/crust-proxy/internal/observe"
	"github.com/crust-proxy/crust-proxy/internal/peercred"
	"github.com/crust-proxy/crust-proxy/internal/run"
	"github.com/crust-proxy/crust-proxy/internal/systemd"
	"github.com/crust-proxy/crust-proxy/pkg/api"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/front"
	"github.com/crust-proxy/crust-proxy/pkg/front/registry"
	"github.com/crust-proxy/crust-proxy/pkg/stats"
)

// daemon is the parts that know each other only through it.
type daemon struct {
	flags *config.Flags
	cfg   atomic.Pointer[config.Config]
	log   *zap.Logger
	level zap.AtomicLevel
	// deniedLog is for callers who may not call: they must not be able to fill
	// the log.
	deniedLog *zap.Logger
	metrics   *observe.Metrics
	tracer    trace.Tracer
	notify    *systemd.Notifier
	passed    *systemd.Inherited

	handlers handlers
	tracker  tracker
	broker   *deferral.Broker
	relay    *stats.Relay
	hub      *api.Hub
	node     *api.Node
	front    *front.Front       // nil where the front is off
	drivers  *registry.Registry // nil where the front is off
	cluster  *cluster.Cluster   // nil where no cluster is asked

	runtimeCallers *peercred.Authorizer
	adminCallers   *peercred.Authorizer
	csiCallers     *peercred.Authorizer // nil where the front is off
	ready          atomic.Bool
	badConfig      atomic.Pointer[error] // what is wrong with the file since it was changed
	started        time.Time
	stopping       chan struct{}
}

// serve is the daemon's life.
func serve(ctx context.Context, flags *config.Flags, _, stderr io.Writer) error {
	cfg, err := flags.Load()
	if err != nil {
		return err
	}
	passed, err := systemd.Inherit("runtime", "admin")
	if err != nil {
		return err
	}
	notify, err := systemd.FromEnvironment()
	if err != nil {
		return err
	}
	level := zap.NewAtomicLevelAt(observe.Level(cfg.Log.Level))
	d := &daemon{
		flags: flags, level: level, log: observe.NewLogger(stderr, level), metrics: observe.NewMetrics(Version()),
		notify: notify, passed: passed, hub: api.NewHub(), started: time.Now(), stopping: make(chan struct{}),
	}
	d.cfg.Store(&cfg)
	d.deniedLog = d.log.WithOptions(zap.WrapCore(func(core zapcore.Core) zapcore.Core {
		return zapcore.NewSamplerWithOptions(core, time.Second, 5, 0)
	}))
	defer func() { _ = d.log.Sync() }()
	err = d.run(ctx)
	if err != nil {
		d.log.Error("ended with an error", zap.Error(err))
	}
	return err
}

func (d *daemon) run(ctx context.Context) error {
	cfg := d.cfg.Load()
	tracer, endTracing, err := observe.Tracing{
		Endpoint: cfg.Tracing.Endpoint, Insecure: cfg.Tracing.Insecure, SampleRatio: cfg.Tracing.SampleRatio, Version: Version(), Log: d.log,
	}.Start(ctx)
	if err != nil {
		return err
	}
	defer d.flushSpans(ctx, endTracing)
	d.tracer = tracer
	release, err := alone(ctx, cfg.RunDir, aloneTime)
	if err != nil {
		return err
	}
	defer release()
	if err := d.leaveFront(cfg); err != nil {
		return err
	}
	if err := d.buildCore(ctx); err != nil {
		return err
	}
	defer d.broker.Close()
	servers, err := d.buildServers()
	if err != nil {
		return err
	}
	defer servers.close()
	return d.live(ctx, servers)
}

func (d *daemon) flushSpans(ctx context.Context, end func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Second)
	defer cancel()
	if err := end(ctx); err != nil {
		d.log.Warn("the last spans were not sent", zap.Error(err))
	}
}

// buildCore makes handlers and broker and takes up what is on record.
func (d *daemon) buildCore(ctx context.Context) error {
	cfg := d.cfg.Load()
	var err error
	d.tracker = d.newTracker(cfg)
	if d.handlers, err = d.newHandlers(cfg); err != nil {
		return err
	}
	prepare, err := newPreparer(cfg, d.log)
	if err != nil {
		return err
	}
	d.broker, err = deferral.NewBroker(deferral.Config{
		StateDir: cfg.StateDir(), KubeletRoot: cfg.KubeletRoot, Devices: devicePolicy(cfg),
		Handlers: d.handlers.projectors(), DefaultHandler: cfg.Handlers.Default,
		Keeper: d.keeper(), Kept: d.passed.Stored, Adopted: d.handlers.adopted, Preparer: prepare,
		OnChange:    d.changed,
		OnPublished: func(v *deferral.Volume) { d.metrics.Published(v.Driver, v.Handler) },
		OnRefused:   func(kind deferral.Kind) { d.metrics.ClaimRefused(kind.String()) },
	})
	if err != nil {
		return err
	}
	d.relay = stats.New(relayLimits(cfg), d.asked)
	d.node = &api.Node{Broker: d.broker, Relay: d.relay, Handlers: d.handlers.byName()}
	if err := errors.Join(d.metrics.CountVolumes(d.countVolumes), d.metrics.WatchNode(d.nodeState)); err != nil {
		return fmt.Errorf("register metrics: %w", err)
	}
	if err := d.takeUp(ctx); err != nil {
		return err
	}
	if err := d.buildCluster(cfg); err != nil {
		return err
	}
	return d.buildFront()
}

// takeUp loads the records and puts the node right before anything is served.
func (d *daemon) takeUp(ctx context.Context) error {
	start := time.Now()
	d.handlers.takeUp()
	if err := d.broker.Load(ctx); err != nil {
		return err
	}
	for _, problem := range d.broker.Problems() {
		d.log.Error("a record cannot be used", zap.Error(problem))
	}
	report, err := d.broker.Reconcile(ctx)
	tellRepairs(d.log, d.metrics)(report)
	if err != nil {
		return err
	}
	d.log.Info("volumes taken up", zap.Int("volumes", report.Checked), zap.Int("repairs", len(report.Repairs)),
		zap.Duration(observe.FieldDuration, time.Since(start)))
	return nil
}

// live runs all components until ctx ends or one fails.
func (d *daemon) live(ctx context.Context, servers *servers) error {
	cfg := d.cfg.Load()
	group := run.New(ctx)
	for _, h := range d.handlers {
		group.Go(h.Name(), h)
	}
	if d.tracker != nil {
		group.Go("containerd", d.tracker)
	}
	group.Go("http", &observe.Server{Listen: cfg.HTTP.Listen, Metrics: d.metrics, Pprof: cfg.HTTP.Pprof,
		Ready: d.readiness, Remarks: d.clusterFindings})
	group.Go("reconcile", &reconcileLoop{
		broker: d.broker, interval: cfg.ReconcileInterval.Std(), log: d.log, done: tellRepairs(d.log, d.metrics),
	})
	group.Go("configuration", &config.Watcher{File: d.flags.File, Changed: d.reload})
	group.Go("SIGHUP", run.Func(d.reloadOnSignal))
	group.Go("watchdog", &systemd.Watchdog{Notifier: d.notify, Alive: d.alive, Log: d.log})
	if d.drivers != nil {
		group.Go("drivers", d.drivers)
	}
	if d.cluster != nil {
		group.Go("cluster", d.cluster)
	}
	narrow()
	servers.start(group, d)
	d.ready.Store(true)
	if err := d.notify.Ready(); err != nil {
		d.log.Warn("systemd was not told", zap.Error(err))
	}
	d.log.Info("serving", zap.String("version", Version()))
	debug.FreeOSMemory() // what the start needed is much, and never needed again
	return group.Wait()
}

// narrow leaves one processor to Go's scheduler once the start, which uses all,
// is done. A call is a chain of goroutines that wait for each other and for other
// processes: on one processor each finds the next one ready, on several it wakes
// another core, which costs a gRPC hop a fifth of its time. What blocks in the
// kernel holds up nobody: the scheduler takes the processor from it. GOMAXPROCS in
// the environment has the last word.
func narrow() {
	if os.Getenv("GOMAXPROCS") == "" {
		goruntime.GOMAXPROCS(1)
	}
}

func (d *daemon) readiness() error {
	if !d.ready.Load() {
		return fmt.Errorf("not serving yet, or not any more")
	}
	return nil
}

// keeper is systemd's file-descriptor store, where there is one.
func (d *daemon) keeper() deferral.FDKeeper {
	if !d.notify.CanStore() {
		return nil
	}
	return d.notify
}

// alive is asked before each word to the watchdog: a daemon whose core is stuck
// is to be restarted.
func (d *daemon) alive(ctx context.Context) error {
	done := make(chan struct{})
	go func() { d.broker.List(); close(done) }()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("the list of volumes did not answer: %w", ctx.Err())
	}
}

// changed tells watchers, and forgets what was known of a volume that went.
func (d *daemon) changed(key deferral.Key) {
	if d.broker != nil && d.relay != nil {
		if _, there := d.broker.Get(key); !there {
			d.relay.Forget(key)
		}
	}
	d.hub.Changed(key)
}

// rebound is told by the handler when the sandbox of a volume changed: what the
// old one said is not true of the new one.
func (d *daemon) rebound(key deferral.Key) {
	if d.relay != nil {
		d.relay.Forget(key)
	}
	d.hub.Changed(key)
}

func (d *daemon) asked(v *deferral.Volume, call string, took time.Duration, err error) {
	result := "ok"
	if err != nil {
		result = deferral.KindOf(err).String()
	}
	d.metrics.SandboxAsked(v.Handler, call, result, took)
}

func (d *daemon) countVolumes() []observe.VolumeCount {
	all := d.node.Shown()
	counts := make(map[observe.VolumeCount]int)
	for _, status := range all {
		counts[observe.VolumeCount{State: d.node.StateOf(status), Driver: status.Driver, Handler: status.Handler}]++
	}
	out := make([]observe.VolumeCount, 0, len(counts))
	for labels, n := range counts {
		labels.Count = n
		out = append(out, labels)
	}
	return out
}
