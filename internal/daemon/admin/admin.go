// Package admin serves the Runtime API and the Admin API over gRPC.
package admin

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/ground/peercred"
	"github.com/crust-proxy/crust-proxy/internal/ground/rpccode"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/runtime"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

const healthTime = 5 * time.Second

// AdminServer is the Admin API.
type AdminServer struct {
	adminv1.UnimplementedAdminServer
	Node    *Node
	Hub     *Hub
	History History
	Daemon  Daemon
	// Stopping is closed when the daemon drains: watches end, so that the daemon does not wait for them.
	Stopping <-chan struct{}
}

// Daemon is what the Admin API needs of the daemon itself.
type Daemon interface {
	// Describe describes the daemon, without its volumes. Public findings do not quote the configuration.
	Describe(ctx context.Context, public bool) *adminv1.GetNodeResponse
	// Drivers returns the CSI drivers that registered with the front, without their numbers of
	// volumes; on is false if the front is off.
	Drivers() (all []*adminv1.Driver, on bool)
	// Explain explains the volumes of a pod of this node.
	Explain(ctx context.Context, pod string) ([]*adminv1.ExplainedVolume, error)
	// Reconcile repairs now.
	Reconcile(ctx context.Context) (deferral.ReconcileReport, error)
	// Forced reports a volume that was released by force, with the processes that still have its device open.
	Forced(v *volume.Volume, heldBy string)
}

// History has events. List returns all events of each volume with one that is wanted, the newest first.
type History interface {
	List(is func(*adminv1.VolumeEvent) bool, limit int) []*adminv1.VolumeEvent
}

// Statuses converts the errors of unary calls to gRPC statuses. It belongs behind the interceptors
// that log and count them.
func Statuses(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	reply, err := handle(ctx, req)
	return reply, rpccode.Status(err)
}

// GetNode describes the daemon.
func (s *AdminServer) GetNode(ctx context.Context, _ *adminv1.GetNodeRequest) (*adminv1.GetNodeResponse, error) {
	return s.describe(ctx, false), nil
}

func (s *AdminServer) describe(ctx context.Context, public bool) *adminv1.GetNodeResponse {
	out := s.Daemon.Describe(ctx, public)
	s.Node.count(s.Node.EachShown(), out)
	return out
}

const (
	defaultPage = 1000
	maxPage     = 5000
)

// ListVolumes lists a page of volumes. The token is the position of the last volume of the
// page before, so that volumes that come or go between two calls do not shift the pages.
func (s *AdminServer) ListVolumes(_ context.Context, req *adminv1.ListVolumesRequest) (*adminv1.ListVolumesResponse, error) {
	if req.GetPageSize() < 0 {
		return nil, volume.Errorf(volume.Invalid, "page_size %d is negative", req.GetPageSize())
	}
	if _, known := adminv1.VolumeState_name[int32(req.GetState())]; !known {
		return nil, volume.Errorf(volume.Invalid, "state %d is unknown", req.GetState())
	}
	size := min(cmp.Or(int(req.GetPageSize()), defaultPage), maxPage)
	target, key, _ := strings.Cut(req.GetPageToken(), "\x00")
	found, more := s.Node.selected(req, deferral.Status{Volume: &volume.Volume{Target: target, Key: volume.Key(key)}}, size)
	out := &adminv1.ListVolumesResponse{Volumes: sys.Map(found, s.Node.message)}
	if more {
		out.NextPageToken = position(found[size-1])
	}
	return out, nil
}

// position is a volume's position in the order of ByTarget.
func position(status deferral.Status) string { return status.Target + "\x00" + string(status.Key) }

func matches(status deferral.Status, driver, handler string) bool {
	return (driver == "" || status.Driver == driver) && (handler == "" || status.Handler == handler)
}

// GetVolume shows one volume.
func (s *AdminServer) GetVolume(ctx context.Context, req *adminv1.GetVolumeRequest) (*adminv1.GetVolumeResponse, error) {
	status, err := s.find(ctx, req.GetVolume())
	if err != nil {
		return nil, err
	}
	return &adminv1.GetVolumeResponse{Volume: s.Node.message(status)}, nil
}

func (s *AdminServer) find(ctx context.Context, ref string) (deferral.Status, error) {
	found, err := s.Node.byReference(ref)
	note(telemetry.CallFrom(ctx), found.Volume)
	return found, err
}

// live finds a volume that a sandbox may have. A refused volume is an error.
func (s *AdminServer) live(ctx context.Context, ref string) (deferral.Status, error) {
	found, err := s.find(ctx, ref)
	if err != nil || !found.Refused {
		return found, err
	}
	why := ""
	if refused := s.Node.refusal(found.Key); refused != nil { // else it was withdrawn a moment ago
		why = ": " + refused.Error
	}
	return found, volume.Errorf(volume.NoSandbox, "volume %s: no sandbox has it, for it was refused%s", found.Target, why)
}

const (
	defaultEvents = 100
	maxEvents     = 10000
)

// ListEvents lists what happened to volumes.
func (s *AdminServer) ListEvents(_ context.Context, req *adminv1.ListEventsRequest) (*adminv1.ListEventsResponse, error) {
	if req.GetLimit() < 0 {
		return nil, volume.Errorf(volume.Invalid, "limit %d is negative", req.GetLimit())
	}
	limit := min(cmp.Or(int(req.GetLimit()), defaultEvents), maxEvents)
	is := func(e *adminv1.VolumeEvent) bool {
		return slices.Contains([]string{"", e.GetTargetPath()}, req.GetVolume()) || isNamed(&volume.Volume{
			Key: volume.Key(e.GetId()), Target: e.GetTargetPath(), PodUID: e.GetPodUid(),
			Origin: &volume.Origin{VolumeID: e.GetVolumeId(), PodNamespace: e.GetPodNamespace(), PodName: e.GetPodName(), PVC: e.GetPvcName()},
		}, req.GetVolume())
	}
	return &adminv1.ListEventsResponse{Events: s.History.List(is, limit)}, nil
}

// GetVolumeStats asks the sandbox.
func (s *AdminServer) GetVolumeStats(ctx context.Context, req *adminv1.GetVolumeStatsRequest) (*adminv1.GetVolumeStatsResponse, error) {
	found, err := s.live(ctx, req.GetVolume())
	if err != nil {
		return nil, err
	}
	answer, err := s.Node.Sandboxes.Stats(ctx, found.Volume)
	if err != nil {
		return nil, err
	}
	return &adminv1.GetVolumeStatsResponse{
		Usage: usageMessages(answer.Report), Condition: conditionMessage(answer.Report),
		Sandbox: s.Node.sandbox(found.Volume), Took: durationpb.New(answer.Took),
	}, nil
}

// ExpandVolume asks the sandbox to grow.
func (s *AdminServer) ExpandVolume(ctx context.Context, req *adminv1.ExpandVolumeRequest) (*adminv1.ExpandVolumeResponse, error) {
	found, err := s.live(ctx, req.GetVolume())
	if err != nil {
		return nil, err
	}
	size, later, err := s.Node.expand(ctx, found.Volume,
		volume.Range{Required: req.GetRequiredBytes(), Limit: req.GetLimitBytes()})
	noteSize(ctx, size, later)
	return &adminv1.ExpandVolumeResponse{CapacityBytes: size, Later: later}, err
}

// ListHandlers shows the handlers.
func (s *AdminServer) ListHandlers(ctx context.Context, _ *adminv1.ListHandlersRequest) (*adminv1.ListHandlersResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, healthTime)
	defer cancel()
	out := &adminv1.ListHandlersResponse{}
	all := s.Node.Each()
	for _, handler := range s.Node.Sandboxes.Handlers {
		name := handler.Name()
		shown := &adminv1.Handler{Name: name, Healthy: true}
		if err := handler.Health(ctx); err != nil {
			shown.Healthy, shown.Problem = false, err.Error()
		}
		for status := range all {
			if status.Handler != name {
				continue
			}
			shown.Volumes++
			if _, bound := s.Node.Sandboxes.Binding(status.Volume); bound {
				shown.Bound++
			}
		}
		out.Handlers = append(out.Handlers, shown)
	}
	slices.SortFunc(out.Handlers, func(x, y *adminv1.Handler) int { return strings.Compare(x.GetName(), y.GetName()) })
	return out, nil
}

// ListDrivers shows the CSI drivers.
func (s *AdminServer) ListDrivers(context.Context, *adminv1.ListDriversRequest) (*adminv1.ListDriversResponse, error) {
	drivers, on := s.Daemon.Drivers()
	volumes := make(map[string]int64)
	for status := range s.Node.Each() {
		volumes[status.Driver]++
	}
	out := &adminv1.ListDriversResponse{FrontEnabled: on, Drivers: drivers}
	for _, d := range out.GetDrivers() {
		d.Volumes = volumes[d.GetName()]
	}
	slices.SortFunc(out.Drivers, func(x, y *adminv1.Driver) int { return strings.Compare(x.GetName(), y.GetName()) })
	return out, nil
}

// Reconcile repairs now.
func (s *AdminServer) Reconcile(ctx context.Context, _ *adminv1.ReconcileRequest) (*adminv1.ReconcileResponse, error) {
	report, err := s.Daemon.Reconcile(ctx)
	if err != nil {
		return nil, err
	}
	out := &adminv1.ReconcileResponse{Checked: int64(report.Checked)}
	for _, repair := range report.Repairs {
		shown := &adminv1.Repair{VolumeId: string(repair.Volume.Key), Action: repair.Action}
		if repair.Err != nil {
			shown.Error = repair.Err.Error()
		}
		out.Repairs = append(out.Repairs, shown)
	}
	return out, nil
}

// WatchVolumes sends all volumes, and then each change.
func (s *AdminServer) WatchVolumes(req *adminv1.WatchVolumesRequest, stream grpc.ServerStreamingServer[adminv1.WatchVolumesResponse]) error {
	// Subscribed before the listing, so that no change falls between the two.
	changes, unsubscribe, err := s.Hub.subscribe()
	if err != nil {
		return rpccode.Status(err)
	}
	defer unsubscribe()
	watch := &watch{server: s, req: req, stream: stream, sent: make(map[volume.Key]string)}
	for _, status := range s.Node.Shown() {
		if err := watch.show(status); err != nil {
			return err
		}
	}
	if err := stream.Send(&adminv1.WatchVolumesResponse{Type: adminv1.WatchVolumesResponse_TYPE_SYNCED}); err != nil {
		return err
	}
	for {
		select {
		case <-stream.Context().Done():
			return nil
		case <-s.Stopping:
			return rpccode.Status(volume.Errorf(volume.NoSandbox, "crust-proxy is shutting down: watch again"))
		case <-changes.wake:
		}
		keys, err := s.Hub.take(changes)
		if err != nil {
			return rpccode.Status(err)
		}
		for _, key := range keys {
			if err := watch.update(key); err != nil {
				return err
			}
		}
	}
}

type watch struct {
	server *AdminServer
	req    *adminv1.WatchVolumesRequest
	stream grpc.ServerStreamingServer[adminv1.WatchVolumesResponse]
	sent   map[volume.Key]string // the targets of the volumes that the client knows of
}

func (w *watch) update(key volume.Key) error {
	if status, ok := w.server.Node.shownByKey(key); ok && matches(status, w.req.GetDriver(), w.req.GetHandler()) {
		return w.show(status)
	}
	target, known := w.sent[key]
	if !known {
		return nil
	}
	delete(w.sent, key)
	return w.stream.Send(&adminv1.WatchVolumesResponse{
		Type:   adminv1.WatchVolumesResponse_TYPE_REMOVED,
		Volume: &adminv1.Volume{Id: string(key), TargetPath: target},
	})
}

func (w *watch) show(status deferral.Status) error {
	if !matches(status, w.req.GetDriver(), w.req.GetHandler()) {
		return nil
	}
	w.sent[status.Key] = status.Target
	return w.stream.Send(&adminv1.WatchVolumesResponse{
		Type: adminv1.WatchVolumesResponse_TYPE_CHANGED, Volume: w.server.Node.message(status),
	})
}

// ExplainPod explains the volumes of a pod.
func (s *AdminServer) ExplainPod(ctx context.Context, req *adminv1.ExplainPodRequest) (*adminv1.ExplainPodResponse, error) {
	found, err := s.Daemon.Explain(ctx, req.GetPod())
	return &adminv1.ExplainPodResponse{Volumes: found}, err
}

// EndOrphans ends processes that keep the device of a volume although their sandbox is over, or lists them.
func (s *AdminServer) EndOrphans(ctx context.Context, req *adminv1.EndOrphansRequest) (*adminv1.EndOrphansResponse, error) {
	found, err := s.find(ctx, req.GetVolume())
	if err != nil {
		return nil, err
	}
	if found.Adopted || found.Refused {
		return nil, volume.Errorf(volume.NotFound, "volume %s is not on record: crust-proxy does not know its sandboxes", found.Target)
	}
	pids := sys.Map(req.GetPids(), func(pid int32) int { return int(pid) })
	users, all := s.Node.Broker.Users(), []deferral.Orphan(nil)
	if pids == nil {
		all, err = users.Orphans(ctx, found.Key)
	} else {
		who, _ := peercred.FromContext(ctx)
		all, err = users.EndOrphans(ctx, found.Key, pids, who.CallerOf("Admin"))
	}
	out := &adminv1.EndOrphansResponse{}
	for _, one := range all {
		out.Orphans = append(out.Orphans, &adminv1.Orphan{
			Pid: int32(one.PID), Program: one.Program, ControlGroup: one.ControlGroup, //nolint:gosec // the kernel's are smaller
			Sandbox: one.Sandbox, Why: one.Why, HeldSince: Stamp(one.Since),
		})
	}
	return out, err
}

// ReleaseVolume releases a volume as RuntimeUnstageVolume does; with force also while a
// process may have its device open.
func (s *AdminServer) ReleaseVolume(ctx context.Context, req *adminv1.ReleaseVolumeRequest) (*adminv1.ReleaseVolumeResponse, error) {
	out := &adminv1.ReleaseVolumeResponse{}
	found, err := s.find(ctx, req.GetVolume())
	switch {
	case err != nil:
		return nil, err
	case found.Adopted:
		err = volume.Errorf(volume.Unsupported, "volume %s: another program published it, and has to remove it", found.Target)
	case found.Refused, found.OffRecord:
		err = volume.Errorf(volume.NotFound, "volume %s is not on record: there is nothing to release", found.Target)
	default:
		if binding, bound := s.Node.Sandboxes.Binding(found.Volume); bound && req.GetForce() {
			out.HeldBy = "sandbox " + binding.Sandbox
		} else if req.GetForce() && found.Device.Kind == "" {
			out.HeldBy = "unknown processes, if any (which device it is, is not known)"
		}
		_, err = s.Node.Broker.ReleaseKey(ctx, found.Key, req.GetForce())
	}
	if err != nil {
		return nil, refusal.WithAdvice(err)
	}
	if held, ok := s.Node.Broker.Users().OffRecord(found.Key); ok {
		out.HeldBy = strings.TrimPrefix(out.HeldBy+", "+held.Held.Processes, ", ")
	}
	if req.GetForce() {
		telemetry.CallFrom(ctx).Detail = "by force, held by " + cmp.Or(out.GetHeldBy(), "nobody")
		s.Daemon.Forced(found.Volume, out.GetHeldBy())
	}
	return out, nil
}

// FreezeVolume blocks all writes to a volume, for at most the given time.
func (s *AdminServer) FreezeVolume(ctx context.Context, req *adminv1.FreezeVolumeRequest) (*adminv1.FreezeVolumeResponse, error) {
	able, v, err := s.freezerOf(ctx, req.GetVolume())
	if err != nil {
		return nil, err
	}
	most := req.GetTimeout()
	if most.CheckValid() != nil || most.GetSeconds() <= 0 || most.GetNanos() != 0 {
		return nil, volume.Errorf(volume.Invalid, "volume %s: timeout must be whole seconds, at least one: say when writes go on by themselves", v.Target)
	}
	telemetry.CallFrom(ctx).Detail = "for at most " + most.AsDuration().String()
	begun := ctx.Err() == nil
	before, _ := s.Node.Sandboxes.Binding(v)
	s.Node.frozen.begin(v.Key)
	defer s.Hub.Changed(v.Key)
	err = able.Freeze(ctx, v, most.AsDuration())
	if after, _ := s.Node.Sandboxes.Binding(v); after.Sandbox != before.Sandbox {
		before.Sandbox = "" // it is not known which one was frozen
	}
	since := time.Now() // before, dirty data was written
	orphaned := s.Node.frozen.note(v.Key, freeze{since: since, until: since.Add(most.AsDuration()), sandbox: before.Sandbox}, err)
	if begun && orphaned {
		// The caller, who saw a failure, would not thaw it.
		ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), thawTime)
		defer cancel()
		s.Node.frozen.noteThaw(v.Key, able.Thaw(ending, v))
	}
	return &adminv1.FreezeVolumeResponse{}, err
}

// ThawVolume allows writes again.
func (s *AdminServer) ThawVolume(ctx context.Context, req *adminv1.ThawVolumeRequest) (*adminv1.ThawVolumeResponse, error) {
	able, v, err := s.freezerOf(ctx, req.GetVolume())
	if err == nil {
		err = able.Thaw(ctx, v)
		s.Node.frozen.noteThaw(v.Key, err)
		s.Hub.Changed(v.Key)
	}
	return &adminv1.ThawVolumeResponse{}, err
}

func (s *AdminServer) freezerOf(ctx context.Context, ref string) (runtime.Freezer, *volume.Volume, error) {
	found, err := s.live(ctx, ref)
	if err != nil {
		return nil, nil, err
	}
	handler, err := s.Node.Sandboxes.Handler(found.Volume)
	if err != nil {
		return nil, nil, err
	}
	able, ok := handler.(runtime.Freezer)
	if !ok {
		return nil, nil, volume.Errorf(volume.Unsupported, "volume %s: the sandboxes of the handler %s cannot be told to hold "+
			"writes: freeze the filesystem from within the pod", found.Target, found.Handler)
	}
	return able, found.Volume, nil
}
