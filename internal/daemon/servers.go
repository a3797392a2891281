package daemon

import (
	"context"
	"errors"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/daemon/admin"
	"github.com/crust-proxy/crust-proxy/internal/daemon/config"
	"github.com/crust-proxy/crust-proxy/internal/ground/peercred"
	"github.com/crust-proxy/crust-proxy/internal/ground/run"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
)

// maxRequest bounds a request: the largest instruction that is accepted. It is also the
// flow-control window, for the reasons in internal/front/passthrough.
const maxRequest = 256 << 10

// streamWorkers is the number of goroutines that handle calls on stacks that have grown.
const streamWorkers = 4

type server struct {
	name     string
	service  string
	grpc     *grpc.Server
	health   *health.Server
	listener net.Listener
	patience time.Duration
	log      *zap.Logger
}

type servers struct{ all []*server }

func (d *daemon) newServers(cfg *config.Config) (*servers, error) {
	d.runtimeCallers = peercred.NewAuthorizer("authorization.runtime", peercred.Policy(cfg.Authorization.Runtime), d.denied)
	d.adminCallers = peercred.NewAuthorizer("authorization.admin", peercred.Policy(cfg.Authorization.Admin), d.denied)
	out := &servers{}
	node := &admin.AdminServer{Node: d.node, Hub: d.hub, History: d.history, Daemon: d, Stopping: d.stopping}
	if cfg.HTTP.View {
		d.http.View = node.View()
	}
	for _, part := range []struct {
		name    string
		desc    *grpc.ServiceDesc
		socket  config.Socket
		callers *peercred.Authorizer
		api     any
	}{
		{"runtime", &runtimev1.Runtime_ServiceDesc, cfg.RuntimeSocket, d.runtimeCallers, &admin.RuntimeServer{Node: d.node}},
		{"admin", &adminv1.Admin_ServiceDesc, cfg.AdminSocket, d.adminCallers, node},
	} {
		listener, err := d.listen(part.name, part.socket)
		if err != nil {
			out.close(d.passed.Listeners)
			return nil, err
		}
		s := d.newServer(part.name, part.desc.ServiceName, part.callers, listener)
		s.grpc.RegisterService(part.desc, part.api)
		out.all = append(out.all, s)
	}
	return out, nil
}

// listen returns the socket that systemd passed, or creates one.
func (d *daemon) listen(name string, socket config.Socket) (net.Listener, error) {
	if passed := d.passed.Listeners[name]; passed != nil {
		return passed, nil
	}
	mode, err := strconv.ParseUint(socket.Mode, 8, 32)
	if err != nil {
		return nil, err // validated before
	}
	return peercred.Listen(socket.Path, os.FileMode(mode), socket.Group)
}

func (d *daemon) newServer(name, service string, allowed *peercred.Authorizer, listener net.Listener) *server {
	calls := telemetry.Interceptors{Log: d.log, Metrics: d.metrics, Tracer: d.tracer, Ended: d.history.Call}
	options := append(allowed.ServerOptions(), calls.Options()...)
	options = append(options, grpc.ChainUnaryInterceptor(admin.Statuses), grpc.ChainStreamInterceptor(d.endWithDaemon),
		grpc.NumStreamWorkers(streamWorkers), grpc.InitialWindowSize(maxRequest), grpc.InitialConnWindowSize(maxRequest),
		grpc.MaxRecvMsgSize(maxRequest), grpc.MaxConcurrentStreams(1024), grpc.ConnectionTimeout(10*time.Second),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}))
	s := &server{
		name: name, service: service, grpc: grpc.NewServer(options...), health: health.NewServer(), listener: listener,
		log: d.log, patience: d.settings.get().ShutdownTimeout,
	}
	healthv1.RegisterHealthServer(s.grpc, s.health)
	reflection.Register(s.grpc)
	return s
}

// endWithDaemon ends streams of gRPC's own services when the daemon stops. A health watch and reflection end when their
// client ends them: they would hold up each stop until shutdownTimeout.
func (d *daemon) endWithDaemon(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	if !strings.HasPrefix(info.FullMethod, "/grpc.") {
		return handle(srv, stream)
	}
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	go func() {
		select {
		case <-d.stopping:
			cancel()
		case <-ctx.Done():
		}
	}()
	return handle(srv, &endingStream{ServerStream: stream, ctx: ctx})
}

// endingStream is a stream that ends with a context other than its own.
type endingStream struct {
	grpc.ServerStream
	ctx context.Context //nolint:containedctx // this is how gRPC hands a stream its context
}

func (s *endingStream) Context() context.Context { return s.ctx }

// RecvMsg receives a message, or fails when the daemon stops.
func (s *endingStream) RecvMsg(into any) error {
	received := make(chan error, 1)
	go func() { received <- s.ServerStream.RecvMsg(into) }() // it fails at the latest when the stream has ended
	select {
	case err := <-received:
		return err
	case <-s.ctx.Done():
		return status.FromContextError(s.ctx.Err()).Err()
	}
}

func (d *daemon) denied(who peercred.Peer) {
	d.metrics.CallerDenied()
	d.deniedLog.Warn("caller refused", zap.Uint32(telemetry.FieldPeerUID, who.UID), zap.Int32(telemetry.FieldPeerPID, who.PID))
}

func (d *daemon) Describe(ctx context.Context, public bool) *adminv1.GetNodeResponse {
	proof, reason := describeProof(d.openers)
	path, yaml := d.settings.shown()
	file := d.settings.file()
	name, _ := d.settings.get().Cluster.Node() // only shown
	problem := ""
	if err := d.http.Problem(); err != nil {
		problem = err.Error()
	}
	failed, warned := d.parts.findings(public)
	mounted, unknown := d.mounted.findings(ctx)
	failed = append(failed, mounted...)
	return &adminv1.GetNodeResponse{
		Version: sys.Version(), StartedAt: admin.Stamp(d.started), ConfigPath: path, Config: yaml, Proof: proof, ProofReason: reason,
		ConfigBadSince: admin.Stamp(file.badSince), ConfigAcceptedAt: admin.Stamp(file.accepted), HttpProblem: problem,
		NodeName: name, ConfigDigest: d.settings.digest(),
		Errors: failed, Findings: slices.Concat(failed, warned, unknown),
	}
}

// Drivers shows the drivers behind the front.
func (d *daemon) Drivers() (all []*adminv1.Driver, on bool) {
	if d.front == nil {
		return nil, false
	}
	return shown(d.front.list()), true
}

func (d *daemon) Explain(ctx context.Context, pod string) ([]*adminv1.ExplainedVolume, error) {
	if d.cluster == nil {
		return nil, volume.Errorf(volume.Unsupported, "no pod is known here: set front.enabled and cluster, or use crust-proxy validate --pod FILE")
	}
	return d.front.explain(ctx, d.settings.get(), pod)
}

func (d *daemon) Forced(v *volume.Volume, heldBy string) {
	d.metrics.ReleasedByForce()
	d.log.Warn("a volume was released by force", append(about(v), zap.String("held_by", heldBy))...)
}

func about(v *volume.Volume) []zap.Field {
	fields := []zap.Field{
		zap.String(telemetry.FieldVolume, string(v.Key)), zap.String(telemetry.FieldTarget, v.Target), zap.String("device", v.Device.Path),
		zap.String(telemetry.FieldDriver, v.Driver), zap.String(telemetry.FieldHandler, v.Handler),
	}
	if of := v.Origin; of != nil {
		fields = append(fields, zap.String(telemetry.FieldCSIVolume, of.VolumeID), zap.String(telemetry.FieldPod, of.PodNamespace+"/"+of.PodName))
	}
	return fields
}

func (s *servers) start(group *run.Group, d *daemon) {
	for _, one := range s.all {
		group.Go(one.name+" API", one.Run)
	}
	group.Go("drain", func(ctx context.Context) error {
		<-ctx.Done()
		d.ready.Store(false)
		if err := d.notify.Stopping(); err != nil {
			d.log.Warn("systemd was not notified", zap.Error(err))
		}
		close(d.stopping)
		return nil
	})
}

// close closes listeners that were not served, unless systemd passed them: a second start serves those.
func (s *servers) close(passed map[string]net.Listener) {
	for _, one := range s.all {
		one.grpc.Stop()
		if passed[one.name] == nil {
			_ = one.listener.Close() // the error of a second close does not matter
		}
	}
}

// Run serves until ctx ends, and then lets the calls in flight end.
func (s *server) Run(ctx context.Context) error {
	s.health.SetServingStatus(s.service, healthv1.HealthCheckResponse_SERVING)
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		<-ctx.Done()
		s.health.Shutdown()
		run.Drain(s.grpc, s.patience, func() { s.log.Warn("calls did not end in time and are cut off", zap.String("server", s.name)) })
	}()
	if err := s.grpc.Serve(s.listener); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
		return err
	}
	<-drained
	return nil
}
