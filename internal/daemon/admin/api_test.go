package admin

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/crust-proxy/crust-proxy/internal/daemon/sandboxes"
	"github.com/crust-proxy/crust-proxy/internal/front/kubelet"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/runtime"
	"github.com/crust-proxy/crust-proxy/pkg/stats"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/check/rpctest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestNobodysVolumeHasNoError: that no sandbox has a volume stays true until a pod starts.
func TestNobodysVolumeHasNoError(t *testing.T) {
	for kind, shown := range map[volume.Kind][2]bool{volume.NoSandbox: {false, true}, volume.Timeout: {true, true}} {
		known := stats.Known{Err: volume.Errorf(kind, "no answer")}
		for i, bound := range []bool{false, true} {
			text, _ := lastError(deferral.Status{}, known, bound)
			check.That(t, (text != "") == shown[i], "%v, bound %v: %q", kind, bound, text)
		}
	}
}

// adopting is a handler of adopted volumes only: it needs no root.
type adopting struct {
	volumes   []*volume.Volume
	report    volume.Report
	err       error
	inUse     string
	abilities deferral.Abilities
}

func (a *adopting) Abilities() deferral.Abilities                           { return a.abilities }
func (a *adopting) Name() string                                            { return "kata" }
func (a *adopting) Check(*volume.Volume) error                              { return nil }
func (a *adopting) Publish(context.Context, *volume.Volume) (bool, error)   { return false, nil }
func (a *adopting) Retract(context.Context, *volume.Volume) error           { return nil }
func (a *adopting) InUse(context.Context, *volume.Volume) (string, error)   { return a.inUse, a.err }
func (a *adopting) Orphans(func(volume.Key) bool) ([]*volume.Volume, error) { return nil, nil }
func (a *adopting) Adopted() []*volume.Volume                               { return a.volumes }
func (a *adopting) AdoptForeign()                                           {}
func (a *adopting) SandboxAdded(string, string)                             {}
func (a *adopting) SandboxGone(string)                                      {}
func (a *adopting) Health(context.Context) error                            { return a.err }
func (a *adopting) Run(ctx context.Context) error                           { <-ctx.Done(); return nil }
func (a *adopting) Stats(context.Context, *volume.Volume) (volume.Report, error) {
	return a.report, a.err
}

func (a *adopting) Resize(_ context.Context, _ *volume.Volume, r volume.Range) (int64, error) {
	return r.Required, a.err
}

func (a *adopting) Binding(v *volume.Volume) (runtime.Binding, bool) {
	return runtime.Binding{Sandbox: "sb-" + v.PodUID, Runtime: "kata-go", Since: time.Unix(1, 0)}, v.PodUID != ""
}

// served is both servers on a real socket.
type served struct {
	handler  *adopting
	node     *Node
	hub      *Hub
	kubelet  string
	conn     *grpc.ClientConn
	stopping chan struct{}
	drivers  []*adminv1.Driver // nil while the front is off
}

func serve(t *testing.T, pods ...string) *served {
	t.Helper()
	s := &served{handler: &adopting{}, hub: NewHub(), kubelet: t.TempDir(), stopping: make(chan struct{})}
	for _, pod := range pods {
		target := filepath.Join(s.kubelet, "pods", pod, "mount")
		s.handler.volumes = append(s.handler.volumes, &volume.Volume{
			Key: volume.KeyOf(target), Target: target, ResolvedTarget: target, Handler: "kata", Driver: "d", PodUID: pod,
			Device: volume.Device{Kind: volume.BlockDevice, Path: "/dev/x"}, Adopted: true,
		})
	}
	broker := check.Value(deferral.NewBroker(deferral.Config{
		StateDir: s.kubelet + "-state", Root: s.kubelet, Describe: kubelet.Describe, Handlers: []deferral.Projector{s.handler}, DefaultHandler: "kata",
		Devices: claim.DevicePolicy{Roots: []string{"/dev"}},
	}))(t)
	limits := stats.Limits{StatsTimeout: time.Second, ExpandTimeout: time.Second, Concurrency: 4, SlowAfter: time.Second, MaxSlow: 4}
	s.node = &Node{Broker: broker, Sandboxes: &sandboxes.Sandboxes{
		Handlers: sandboxes.Handlers{s.handler}, Relay: stats.New(limits, nil), EndGrowth: broker.EndGrowth, Missing: volume.Unsupported,
	}}
	server := grpc.NewServer(grpc.UnaryInterceptor(Statuses))
	runtimev1.RegisterRuntimeServer(server, &RuntimeServer{Node: s.node})
	adminv1.RegisterAdminServer(server, &AdminServer{Node: s.node, Hub: s.hub, Daemon: s, Stopping: s.stopping})
	socket := filepath.Join(t.TempDir(), "s")
	t.Cleanup(broker.Close)
	rpctest.Serve(t, socket, server)
	s.conn = rpctest.Dial(t, socket)
	return s
}

func (s *served) Describe(context.Context, bool) *adminv1.GetNodeResponse {
	return &adminv1.GetNodeResponse{Version: "v1", Findings: []string{"something is wrong"}}
}

func (s *served) Drivers() ([]*adminv1.Driver, bool) { return s.drivers, s.drivers != nil }

func (s *served) Reconcile(ctx context.Context) (deferral.ReconcileReport, error) {
	return s.node.Broker.Reconcile(ctx)
}

func (s *served) Explain(_ context.Context, pod string) ([]*adminv1.ExplainedVolume, error) {
	if pod != "shop/db-0" {
		return nil, volume.Errorf(volume.Busy, "the pod %s is not known", pod)
	}
	return []*adminv1.ExplainedVolume{{Volume: "data", Outcome: "on the host"}}, nil
}

func TestExplainPod(t *testing.T) {
	s := serve(t)
	got, err := s.admin().ExplainPod(t.Context(), &adminv1.ExplainPodRequest{Pod: "shop/db-0"})
	check.That(t, err == nil && len(got.GetVolumes()) == 1 && got.GetVolumes()[0].GetVolume() == "data", "got %v, %v", got, err)
	check.Code(t, check.Err(s.admin().ExplainPod(t.Context(), &adminv1.ExplainPodRequest{Pod: "x"})), codes.Aborted) // an unknown pod
}

func (s *served) Forced(*volume.Volume, string) {}

func (s *served) admin() adminv1.AdminClient { return adminv1.NewAdminClient(s.conn) }

func TestUnknownEnumNumbersAreRefused(t *testing.T) {
	s := serve(t)
	client := runtimev1.NewRuntimeClient(s.conn)
	req := &runtimev1.RuntimeStageVolumeRequest{
		VolumeType:       &runtimev1.VolumeType{Type: 9},
		VolumeTargetPath: s.kubelet + "/x", VolumeBackingPath: "/dev/x", FsType: "ext4",
	}
	check.Code(t, check.Err(client.RuntimeStageVolume(t.Context(), req)), codes.InvalidArgument, "volume_type", "unknown")
	req.VolumeType.Type = runtimev1.VolumeType_BLOCK
	req.VolumeSupplementalGroup, req.VolumeSupplementalGroupChangePolicy = "7", 9
	check.Code(t, check.Err(client.RuntimeStageVolume(t.Context(), req)), codes.InvalidArgument, "policy") // an unknown policy
}

func TestListPages(t *testing.T) {
	s := serve(t, "c", "a", "b", "d", "e")
	var got []string
	token := ""
	for pages := 1; ; pages++ {
		reply := check.Value(s.admin().ListVolumes(t.Context(), &adminv1.ListVolumesRequest{PageSize: 2, PageToken: token}))(t)
		for _, v := range reply.GetVolumes() {
			got = append(got, v.GetPodUid())
		}
		if token = reply.GetNextPageToken(); token == "" {
			check.That(t, pages == 3, "%d pages", pages)
			break
		}
	}
	check.That(t, slices.Equal(got, []string{"a", "b", "c", "d", "e"}), "got %q", got)
	for _, req := range []*adminv1.ListVolumesRequest{{Driver: "x"}, {Handler: "x"}, {State: adminv1.VolumeState_VOLUME_STATE_BOUND}} {
		reply, err := s.admin().ListVolumes(t.Context(), req)
		check.That(t, err == nil && len(reply.GetVolumes()) == 0, "%v selects %d, %v", req, len(reply.GetVolumes()), err)
	}
	check.Code(t, check.Err(s.admin().ListVolumes(t.Context(), &adminv1.ListVolumesRequest{PageSize: -1})), codes.InvalidArgument) // a negative page
	check.Code(t, check.Err(s.admin().ListVolumes(t.Context(), &adminv1.ListVolumesRequest{State: 99})), codes.InvalidArgument, "state 99")
}

// TestPagesOfBoth: pages of volumes on record and of others are those of one list, whatever is selected.
func TestPagesOfBoth(t *testing.T) {
	var all, ours, others []deferral.Status
	for n := range 40 {
		status := deferral.Status{Volume: &volume.Volume{Target: fmt.Sprintf("/%02d", n/2), Key: volume.Key(fmt.Sprint(n)), FSType: fmt.Sprint(n % 3)}}
		all = append(all, status)
		if n%7 < 4 {
			ours = append(ours, status)
			others = append(others, deferral.Status{Volume: status.Volume, Refused: true}) // it came on record while the page was made
		} else {
			others = append(others, status)
		}
	}
	slices.SortFunc(all, deferral.ByTarget)
	slices.SortFunc(ours, deferral.ByTarget)
	slices.Reverse(others)
	after := func(behind deferral.Status, most int) []deferral.Status {
		rest := slices.DeleteFunc(slices.Clone(ours), func(s deferral.Status) bool { return deferral.ByTarget(s, behind) <= 0 })
		return rest[:min(len(rest), most)]
	}
	for _, fs := range []string{"", "0", "none"} {
		selects := func(s deferral.Status) bool { return fs == "" || s.FSType == fs }
		want := slices.DeleteFunc(slices.Clone(all), func(s deferral.Status) bool { return !selects(s) })
		for size := 1; size <= len(all)+1; size++ {
			var got []deferral.Status
			behind, more := deferral.Status{Volume: &volume.Volume{}}, true
			for more {
				var found []deferral.Status
				found, more = page{after, others, selects}.of(behind, size)
				check.Require(t, !more || len(found) == size, "a page of %d has %d volumes, and there are more", size, len(found))
				if got = append(got, found...); more {
					behind = found[size-1]
				}
			}
			check.That(t, slices.EqualFunc(got, want, func(x, y deferral.Status) bool { return x.Key == y.Key && x.Refused == y.Refused }), "%q by %d: got %d of %d", fs, size, len(got), len(want))
		}
	}
}

// TestPagesOfVolumesWithOneTarget: other programs may name one for several volumes.
func TestPagesOfVolumesWithOneTarget(t *testing.T) {
	s := serve(t, "a", "b", "c")
	for _, v := range s.handler.volumes {
		v.Target = s.handler.volumes[0].Target
	}
	seen := make(map[string]bool)
	for token, page := "", 0; page == 0 || token != ""; page++ {
		reply, err := s.admin().ListVolumes(t.Context(), &adminv1.ListVolumesRequest{PageSize: 1, PageToken: token})
		check.Require(t, err == nil && len(reply.GetVolumes()) == 1 && !seen[reply.GetVolumes()[0].GetId()],
			"after %d volumes: %v, %v", len(seen), reply, err)
		seen[reply.GetVolumes()[0].GetId()] = true
		token = reply.GetNextPageToken()
	}
	check.That(t, len(seen) == 3, "listed are %d volumes", len(seen))
}

func TestVolumesAreFoundByPathAndID(t *testing.T) {
	s := serve(t, "a", "b")
	v := s.handler.volumes[0]
	for _, ref := range []string{v.Target, string(v.Key), string(v.Key[:6])} {
		reply, err := s.admin().GetVolume(t.Context(), &adminv1.GetVolumeRequest{Volume: ref})
		check.That(t, err == nil && reply.GetVolume().GetId() == string(v.Key) && reply.GetVolume().GetSandbox().GetId() == "sb-a",
			"%s: %v, %v", ref, reply, err)
	}
	for ref, want := range map[string]codes.Code{
		"":                     codes.InvalidArgument,
		string(v.Key[:5]):      codes.NotFound, // too short
		"nonsense":             codes.NotFound,
		"000000000000":         codes.NotFound,
		s.kubelet + "/unknown": codes.NotFound,
		"/etc":                 codes.InvalidArgument,
	} {
		_, err := s.admin().GetVolume(t.Context(), &adminv1.GetVolumeRequest{Volume: ref})
		check.That(t, status.Code(err) == want, "%q: %v; want %v", ref, err, want)
	}
}

// TestVolumesAreFoundByName: by any name that one volume has. Of several none is chosen.
func TestVolumesAreFoundByName(t *testing.T) {
	s := serve(t, "0f0e0d0c-1111", "b", "c")
	a, b, c := s.handler.volumes[0], s.handler.volumes[1], s.handler.volumes[2]
	a.Target = s.kubelet + "/pods/a/volumes/kubernetes.io~csi/pv-1/mount"
	a.Origin = &volume.Origin{VolumeID: "/subscriptions/7/disks/a", PodNamespace: "shop", PodName: "web-0", PVC: "data"}
	b.Origin = &volume.Origin{VolumeID: "vol-b", PodNamespace: "shop", PodName: "web-1", PVC: "logs"}
	c.Origin = &volume.Origin{VolumeID: "vol-c", PodNamespace: "other", PodName: "web-1", PVC: string(b.Key)}
	for ref, want := range map[string]*volume.Volume{
		"shop/web-0": a, "web-0": a, "shop/data": a, "data": a, "0f0e0d0c-1111": a, "0f0e0d0c": a, "pv-1": a, "/subscriptions/7/disks/a": a,
		"shop/web-1": b, "other/web-1": c, "vol-b": b, string(b.Key): b, "other/" + string(b.Key): c,
	} {
		reply, err := s.admin().GetVolume(t.Context(), &adminv1.GetVolumeRequest{Volume: ref})
		check.That(t, err == nil && reply.GetVolume().GetId() == string(want.Key) && reply.GetVolume().GetPvcName() == want.Origin.PVC,
			"%s: %v, %v", ref, reply, err)
	}
	c.Origin.PVC = string(b.Key[:12]) // as its author pleases
	for _, ref := range []string{"web-1", string(b.Key[:12])} {
		_, err := s.admin().ReleaseVolume(t.Context(), &adminv1.ReleaseVolumeRequest{Volume: ref, Force: true})
		for _, v := range []*volume.Volume{b, c} {
			check.Code(t, err, codes.InvalidArgument, "\n  "+string(v.Key)+"  pod "+v.Origin.PodNamespace+"/web-1, volume "+v.Origin.PVC)
		}
	}
	b.Target, c.Target = "/srv/one", "/srv/one" // as their programs please
	for _, ref := range []string{"/srv/one", "0f0e0d0", "shop/", "/web-0", "shop", "shop/pv-1", "web"} {
		reply, err := s.admin().GetVolume(t.Context(), &adminv1.GetVolumeRequest{Volume: ref})
		check.That(t, err != nil, "%s names %v", ref, reply)
	}
}

func TestStatsAndExpandAreRelayed(t *testing.T) {
	s := serve(t, "a")
	v := s.handler.volumes[0]
	s.handler.report = volume.Report{
		Usage:     []volume.Usage{{Total: 10, Used: 4, Available: 6, Unit: volume.UnitBytes}},
		Condition: &volume.Condition{Abnormal: true, Message: "read-only"}, GroupIgnored: true,
	}
	reply, err := runtimev1.NewRuntimeClient(s.conn).RuntimeGetVolumeStats(t.Context(),
		&runtimev1.RuntimeGetVolumeStatsRequest{VolumeTargetPath: v.Target})
	check.That(t, err == nil && len(reply.GetUsage()) == 1 && reply.GetUsage()[0].GetUsed() == 4 &&
		reply.GetUsage()[0].GetUnit() == runtimev1.VolumeUsage_BYTES && reply.GetVolumeCondition().GetAbnormal(), "%v, %v", reply, err)
	shown, err := s.admin().GetVolume(t.Context(), &adminv1.GetVolumeRequest{Volume: v.Target})
	check.That(t, err == nil && len(shown.GetVolume().GetUsage()) == 1 && shown.GetVolume().GetUsageAt() != nil,
		"the last known usage is not shown: %v, %v", shown, err)
	check.That(t, shown.GetVolume().GetGroupProblem() == runtime.GroupIgnored, "that the group is ignored is not shown: %v", shown)
	grown, err := s.admin().ExpandVolume(t.Context(), &adminv1.ExpandVolumeRequest{Volume: v.Target, RequiredBytes: 7})
	check.That(t, err == nil && grown.GetCapacityBytes() == 7, "%v, %v", grown, err)
	s.handler.err = volume.Errorf(volume.Denied, "volume %s: it does not grow", v.Target)
	check.Code(t, check.Err(s.admin().ExpandVolume(t.Context(), &adminv1.ExpandVolumeRequest{Volume: v.Target})), codes.PermissionDenied)
	shown, err = s.admin().GetVolume(t.Context(), &adminv1.GetVolumeRequest{Volume: v.Target})
	check.That(t, err == nil && strings.Contains(shown.GetVolume().GetLastError(), "does not grow") && shown.GetVolume().GetLastErrorAt() != nil,
		"why it did not grow is not shown: %v, %v", shown, err)
	s.handler.err = volume.Errorf(volume.NoSandbox, "volume %s: no sandbox", v.Target)
	check.Code(t, check.Err(s.admin().GetVolumeStats(t.Context(), &adminv1.GetVolumeStatsRequest{Volume: v.Target})), codes.Unavailable)
	shown, err = s.admin().GetVolume(t.Context(), &adminv1.GetVolumeRequest{Volume: v.Target})
	check.That(t, err == nil && strings.Contains(shown.GetVolume().GetLastError(), "no sandbox") && len(shown.GetVolume().GetUsage()) == 1,
		"the last error, beside the last usage, is not shown: %v, %v", shown, err)
	check.That(t, shown.GetVolume().GetCondition().GetAbnormal(), "the last condition, which the metric counts, is not shown: %v", shown)
	counted := shown.GetVolume()
	check.That(t, counted.GetStatsRequests() == 2 && counted.GetStatsFailures() == 1 && counted.GetStatsAt() != nil && counted.GetStatsTook() != nil,
		"what the relay counted is not shown: %v", shown)
	handlers, err := s.admin().ListHandlers(t.Context(), &adminv1.ListHandlersRequest{})
	check.That(t, err == nil && len(handlers.GetHandlers()) == 1 && !handlers.GetHandlers()[0].GetHealthy() && handlers.GetHandlers()[0].GetBound() == 1,
		"%v, %v", handlers, err)
}

// watch begins to watch, and returns a function that waits for the next event.
func (s *served) watch(t *testing.T, req *adminv1.WatchVolumesRequest) (
	grpc.ServerStreamingClient[adminv1.WatchVolumesResponse], func() *adminv1.WatchVolumesResponse,
) {
	t.Helper()
	stream := check.Value(s.admin().WatchVolumes(check.Within(t, 2*time.Minute), req))(t)
	return stream, func() *adminv1.WatchVolumesResponse {
		t.Helper()
		return check.Value(stream.Recv())(t)
	}
}

func TestWatch(t *testing.T) {
	s := serve(t, "a", "b")
	stream, next := s.watch(t, &adminv1.WatchVolumesRequest{})
	for range 2 {
		check.Equal(t, next().GetType(), adminv1.WatchVolumesResponse_TYPE_CHANGED, "first")
	}
	check.Equal(t, next().GetType(), adminv1.WatchVolumesResponse_TYPE_SYNCED, "then")
	gone := s.handler.volumes[1]
	s.hub.Changed(s.handler.volumes[0].Key)
	check.Equal(t, next().GetVolume().GetPodUid(), "a", "what changed")
	s.handler.volumes = s.handler.volumes[:1]
	s.hub.Changed(gone.Key)
	event := next()
	check.That(t, event.GetType() == adminv1.WatchVolumesResponse_TYPE_REMOVED && event.GetVolume().GetTargetPath() == gone.Target, "got %v", event)
	close(s.stopping)
	check.Code(t, check.Err(stream.Recv()), codes.Unavailable) // a watch at shut-down
}

// TestWatchersAreBounded: each costs memory by the number of volumes, and a program that
// forgets to end its watches would have the daemon killed for it.
func TestWatchersAreBounded(t *testing.T) {
	s := serve(t, "a")
	client := s.admin()
	synced := func(ctx context.Context) error {
		stream, err := client.WatchVolumes(ctx, &adminv1.WatchVolumesRequest{})
		for err == nil {
			var event *adminv1.WatchVolumesResponse
			if event, err = stream.Recv(); event.GetType() == adminv1.WatchVolumesResponse_TYPE_SYNCED {
				return nil
			}
		}
		return err
	}
	first, end := context.WithCancel(t.Context())
	check.Must(t, synced(first))
	for range maxWatchers - 1 {
		check.Must(t, synced(t.Context()))
	}
	check.Code(t, synced(t.Context()), codes.ResourceExhausted) // one more
	end()
	check.Succeeds(t, "a watch that has ended does not count", func() error { return synced(t.Context()) })
}

func TestSlowWatcherCostsOneEntryAVolume(t *testing.T) {
	hub := NewHub()
	w, unsubscribe, err := hub.subscribe()
	check.Must(t, err)
	for range 1000 {
		hub.Changed("a")
		hub.Changed("b")
	}
	check.Equal(t, len(check.Value(hub.take(w))(t)), 2, "changes that wait")
	unsubscribe()
	hub.Changed("c")
	check.Empty(t, check.Value(hub.take(w))(t), "changes a reader that went is told of")
}

// TestWatchThatIsNotRead ends, although new volumes come and go without end.
func TestWatchThatIsNotRead(t *testing.T) {
	s := serve(t)
	stream, next := s.watch(t, &adminv1.WatchVolumesRequest{})
	next() // SYNCED
	s.hub.mu.Lock()
	for w := range s.hub.watchers {
		hub := &Hub{watchers: map[*watcher]struct{}{w: {}}} // the server reads nothing meanwhile
		for n := range 2 * maxPending {
			hub.Changed(volume.Key(fmt.Sprint(n)))
		}
		check.Equal(t, len(w.pending), maxPending+1, "changes that wait")
	}
	s.hub.mu.Unlock()
	check.Code(t, check.Err(stream.Recv()), codes.ResourceExhausted)
}

func TestNodeAndReconcile(t *testing.T) {
	s := serve(t, "a")
	node, err := s.admin().GetNode(t.Context(), &adminv1.GetNodeRequest{})
	check.That(t, err == nil && node.GetVersion() == "v1" && node.GetVolumesByState()["adopted"] == 1 && len(node.GetFindings()) == 1,
		"%v, %v", node, err)
	one, other := claim.Held{Volume: s.handler.volumes[0], Forced: true}, claim.Held{Volume: s.handler.volumes[0]}
	s.node.count(slices.Values([]deferral.Status{deferral.HeldStatus(one), deferral.HeldStatus(other)}), node)
	check.That(t, node.GetVolumesByState()["held"] == 2 && node.GetVolumesReleasedByForce() == 1, "%v", node)
	report, err := s.admin().Reconcile(t.Context(), &adminv1.ReconcileRequest{})
	check.That(t, err == nil && report.GetChecked() == 0, "%v, %v", report, err)
}

// TestGrowthBeforeThereIsASandbox is bounded by the device: kubelet asks before it starts the pod. What the
// device has is put on record, and this volume has none.
func TestGrowthBeforeThereIsASandbox(t *testing.T) {
	s := serve(t)
	s.handler.abilities.GrowsAtMount, s.handler.err = true, volume.Errorf(volume.NoSandbox, "no sandbox")
	image := filepath.Join(t.TempDir(), "image")
	check.Must(t, os.WriteFile(image, make([]byte, 8192), 0o600))
	v := &volume.Volume{Key: "a", Target: "/t", Handler: "kata", Device: claim.Identify(image)}
	for wish, want := range map[volume.Range]volume.Kind{
		{Required: 8193}: volume.OutOfRange, {Required: 4096, Limit: 8191}: volume.OutOfRange,
		{Required: 8192, Limit: 8192}: volume.NotFound, {}: volume.NotFound,
	} {
		_, later, err := s.node.expand(t.Context(), v, wish)
		check.That(t, !later && err != nil && volume.KindOf(err) == want && strings.Contains(err.Error(), "than the limit") == (wish.Limit == 8191), "%+v of 8192 bytes: %v; want %v", wish, err, want)
	}
}

// growing is a handler whose sandbox is asked to grow a volume, and the record of that growth.
type growing struct {
	*adopting
	answer              error
	size, asked, record int64
}

func (g *growing) Resize(_ context.Context, _ *volume.Volume, r volume.Range) (int64, error) {
	g.asked++
	return min(g.size, r.Required), g.answer
}

// TestMayRun: of a volume without a pod memory has no binding, as of any after a restart, or while its containers crash.
func TestMayRun(t *testing.T) {
	for handler, want := range map[*adopting]bool{{}: false, {inUse: "sb1"}: true, {err: context.Canceled}: true} {
		calls := sandboxes.Sandboxes{Handlers: sandboxes.Handlers{handler}}
		check.Equal(t, calls.MayRun(t.Context(), &volume.Volume{Handler: "kata"}), want, "%q, %v", handler.inUse, handler.err)
		check.That(t, calls.MayRun(t.Context(), &volume.Volume{Handler: "crust"}), "a handler that is not configured any more has none")
	}
}

// A sandbox that was mounting the volume while it was expanded had not left its id, so that the growth was put on
// record, and may have looked at the device before it grew. It is asked until it has grown, and that ends the record.
func TestGrowthThatTheMountMissed(t *testing.T) {
	busy, cannot := volume.Errorf(volume.Refused, "busy"), volume.Errorf(volume.Unsupported, "cannot grow")
	synctest.Test(t, func(t *testing.T) {
		handler, grown := &growing{adopting: &adopting{abilities: deferral.Abilities{GrowsAtMount: true}}}, false
		calls := &sandboxes.Sandboxes{
			Handlers: sandboxes.Handlers{handler}, Relay: stats.New(stats.Limits{StatsTimeout: time.Second, ExpandTimeout: time.Second}, nil),
			HasGrown:  func(*volume.Volume) bool { return grown },
			EndGrowth: func(_ volume.Key, size int64) error { handler.record -= size; return nil },
		}
		front := *calls // as the daemon makes it
		for i, step := range []struct {
			after         time.Duration
			growTo        int64
			sandbox       string
			size          int64
			answer        error
			asked, record int64
		}{
			{0, 0, "first", 7, nil, 0, 7}, // before the growth is on record
			{0, 7, "first", 0, busy, 1, 7},
			{0, 7, "next", 0, busy, 1, 7},
			{59 * time.Second, 7, "next", 7, nil, 0, 7},
			{2 * time.Second, 7, "next", 0, cannot, 1, 7},
			{23 * time.Hour, 7, "next", 7, nil, 0, 7},
			{2 * time.Hour, 7, "next", 6, nil, 1, 7},
			{61 * time.Second, 7, "next", 7, nil, 1, 0},
		} {
			time.Sleep(step.after)
			handler.report.Sandbox, handler.size, handler.answer, handler.asked, handler.record = step.sandbox, step.size, step.answer, 0, 7
			v := &volume.Volume{Key: "a", Handler: "kata", GrowTo: step.growTo}
			for range 3 {
				check.Value(calls.Stats(t.Context(), v))(t)
				check.Value(front.Stats(t.Context(), v))(t)
			}
			synctest.Wait()
			check.That(t, handler.asked == step.asked && handler.record == step.record, "%d: asked %d times, on record %d", i, handler.asked, handler.record)
		}
		grown, handler.asked, handler.record, handler.report.Sandbox = true, 0, 7, "third"
		check.Value(calls.Stats(t.Context(), &volume.Volume{Key: "a", Handler: "kata", GrowTo: 7}))(t)
		synctest.Wait()
		check.That(t, handler.asked == 0 && handler.record == 0, "grown: asked %d times, on record %d", handler.asked, handler.record)
	})
}

func TestReleaseOfWhatIsNotOurs(t *testing.T) {
	s := serve(t, "a")
	for volume, want := range map[string]codes.Code{
		s.handler.volumes[0].Target: codes.Unimplemented, // another program's
		s.kubelet + "/pods/b/mount": codes.NotFound,
		"x":                         codes.NotFound,
	} {
		check.Code(t, check.Err(s.admin().ReleaseVolume(t.Context(), &adminv1.ReleaseVolumeRequest{Volume: volume, Force: true})), want)
	}
}

// TestForcedReleaseOfAnUnknownDevice: nobody can be asked who has it, so it is not held for ever.
func TestForcedReleaseOfAnUnknownDevice(t *testing.T) {
	s, key := serve(t), string(volume.KeyOf("/lost"))
	check.Must(t, os.WriteFile(s.kubelet+"-state/volumes/"+key+".json", nil, 0o600))
	check.Must(t, s.node.Broker.Load(t.Context()))
	got := check.Value(s.admin().ReleaseVolume(t.Context(), &adminv1.ReleaseVolumeRequest{Volume: key, Force: true}))(t)
	check.That(t, strings.Contains(got.GetHeldBy(), "is not known") && len(s.node.Broker.Users().Held()) == 0, "%v", got)
}

// freezing is a handler that can hold volumes still.
type freezing struct {
	adopting
	frozen   time.Duration
	thaws    int
	replaced string // the sandbox that comes meanwhile
	waits    func() error
}

func (f *freezing) Freeze(_ context.Context, _ *volume.Volume, timeout time.Duration) error {
	if f.waits != nil {
		return f.waits()
	}
	f.frozen = timeout
	if f.replaced != "" {
		f.volumes[0].PodUID = f.replaced
	}
	return f.err
}

func (f *freezing) Thaw(context.Context, *volume.Volume) error {
	f.frozen, f.thaws = 0, f.thaws+1
	return f.err
}

// freeze freezes the first volume.
func (s *served) freeze(t *testing.T, timeout *durationpb.Duration) error {
	return check.Err(s.admin().FreezeVolume(t.Context(), &adminv1.FreezeVolumeRequest{Volume: s.handler.volumes[0].Target, Timeout: timeout}))
}

// TestFreezeOfTwoCallers: one who waited for the other in vain does not thaw that one's freeze. The last of those who
// all failed does.
func TestFreezeOfTwoCallers(t *testing.T) {
	silent := volume.Errorf(volume.Timeout, "volume a: another call holds its record")
	for thaws, outcome := range []error{nil, silent} {
		s := serve(t, "a")
		first, second, frozen := make(chan struct{}), make(chan error), make(chan error)
		able := &freezing{adopting: adopting{volumes: s.handler.volumes}}
		s.node.Sandboxes.Handlers[0] = able
		freeze := func() error { return s.freeze(t, durationpb.New(time.Minute)) }
		var calls atomic.Int32
		able.waits = func() error {
			if calls.Add(1) == 1 {
				close(first)
				return <-frozen
			}
			return silent
		}
		go func() { second <- freeze() }()
		<-first
		check.Code(t, freeze(), codes.DeadlineExceeded)
		check.Equal(t, able.thaws, 0, "thaws")
		frozen <- outcome
		err := <-second
		check.That(t, (err == nil) == (outcome == nil), "the first: %v", err)
		check.Equal(t, able.thaws, thaws, "thaws")
	}
}

func TestFreeze(t *testing.T) {
	s := serve(t, "a")
	target := s.handler.volumes[0].Target
	freeze := func(timeout *durationpb.Duration) error { return s.freeze(t, timeout) }
	thaw := func() error {
		return check.Err(s.admin().ThawVolume(t.Context(), &adminv1.ThawVolumeRequest{Volume: target}))
	}
	get := func() *adminv1.Volume {
		return check.Value(s.admin().GetVolume(t.Context(), &adminv1.GetVolumeRequest{Volume: target}))(t).GetVolume()
	}
	snapshots := func() string { return get().GetSnapshots() }
	check.That(t, snapshots() == "as after a crash (the handler kata cannot freeze)", "a handler that cannot: %s", snapshots())
	for _, err := range []error{freeze(durationpb.New(time.Second)), thaw()} {
		check.That(t, status.Code(err) == codes.Unimplemented && strings.Contains(err.Error(), target), "a handler that cannot: %v", err)
	}
	able := &freezing{adopting: adopting{volumes: s.handler.volumes}}
	s.node.Sandboxes.Handlers[0] = able
	shown := func() time.Duration {
		v := get()
		return v.GetFrozenUntil().AsTime().Sub(v.GetFrozenSince().AsTime())
	}
	const open = "as after a crash, unless frozen while its pod runs: crustctl freeze"
	check.That(t, snapshots() == open, "before a freeze: %s", snapshots())
	_, next := s.watch(t, &adminv1.WatchVolumesRequest{})
	for next().GetType() != adminv1.WatchVolumesResponse_TYPE_SYNCED {
	}
	check.Must(t, freeze(durationpb.New(time.Minute)))
	check.Equal(t, next().GetVolume().GetSnapshots(), snapshots(), "a watcher is told")
	check.That(t, able.frozen == time.Minute && shown() == time.Minute, "frozen for %v, shown as %v", able.frozen, shown())
	check.That(t, snapshots() == "clean (frozen by the Admin API)", "frozen: %s", snapshots())
	able.volumes[0].PodUID = "b"
	check.That(t, snapshots() == open, "a later sandbox, which nobody froze: %s", snapshots())
	able.replaced = "c"
	check.Must(t, freeze(durationpb.New(time.Minute)))
	check.That(t, snapshots() == open, "a sandbox that came while another one was frozen: %s", snapshots())
	able.replaced = ""
	check.Must(t, thaw())
	check.That(t, able.frozen == 0 && shown() == 0, "frozen for %v, shown as %v", able.frozen, shown())
	for next().GetVolume().GetFrozenUntil() != nil {
	}
	check.Must(t, freeze(durationpb.New(time.Second)))
	check.Eventually(t, "a freeze whose time is over is not shown", func() bool { return shown() == 0 && snapshots() == open })
	var written time.Time // the time of a freeze begins when what was dirty is written
	able.waits = func() error { time.Sleep(time.Millisecond); written = time.Now(); return nil }
	check.Must(t, freeze(durationpb.New(time.Minute)))
	until := get().GetFrozenUntil()
	check.That(t, until.AsTime().Sub(written) >= time.Minute, "a freeze that took a while is shown for %v", until.AsTime().Sub(written))
	able.waits = nil
	check.Must(t, thaw())
	for _, wrong := range []*durationpb.Duration{nil, durationpb.New(-time.Second), {Seconds: 1, Nanos: -1}, durationpb.New(1500 * time.Millisecond)} {
		check.Code(t, freeze(wrong), codes.InvalidArgument)
	}
	able.err, able.thaws = volume.Errorf(volume.Timeout, "volume %s: no answer", target), 0
	for before := range 2 { // nobody counts on the first either
		check.Fails(t, freeze(durationpb.New(time.Minute)))
		check.That(t, shown() == time.Minute && snapshots() == open && able.thaws == before+1, "a freeze that may be is shown as %v, %s; %d thaws", shown(), snapshots(), able.thaws)
	}
	able.err = volume.Errorf(volume.InUse, "volume %s: it is not frozen", target)
	check.Code(t, thaw(), codes.FailedPrecondition)
}

func TestListDrivers(t *testing.T) {
	s := serve(t, "pod-1", "pod-2")
	off := check.Value(s.admin().ListDrivers(t.Context(), &adminv1.ListDriversRequest{}))(t)
	check.That(t, !off.GetFrontEnabled() && len(off.GetDrivers()) == 0, "the front is off: %v", off)
	since := time.Unix(1700000000, 0)
	s.drivers = []*adminv1.Driver{
		{Name: "z", Problem: "its socket is gone", DirectlyRegistered: true},
		{Name: "d", Version: "v2", Endpoint: "/d.sock", CsiSocket: "/run/d.sock", Capabilities: []string{"STAGE_UNSTAGE_VOLUME"},
			Mode: volume.WayBlock, Ready: true, Since: timestamppb.New(since), KubeletStatus: "registered"},
	}
	got := check.Value(s.admin().ListDrivers(t.Context(), &adminv1.ListDriversRequest{}))(t)
	want := &adminv1.ListDriversResponse{FrontEnabled: true, Drivers: []*adminv1.Driver{
		{Name: "d", Version: "v2", Endpoint: "/d.sock", CsiSocket: "/run/d.sock", Capabilities: []string{"STAGE_UNSTAGE_VOLUME"},
			Mode: "block", Ready: true, Since: timestamppb.New(since), KubeletStatus: "registered", Volumes: 2},
		{Name: "z", Problem: "its socket is gone", DirectlyRegistered: true},
	}}
	check.Same(t, cmp.Diff(want, got, protocmp.Transform()), "-want +got")
}

func TestVolumesShowTheirOrigin(t *testing.T) {
	s := serve(t, "pod-1")
	v := s.handler.volumes[0]
	v.Origin = &volume.Origin{VolumeID: "vol-1", Way: volume.WayBlock, Rule: `rule "a"`, AccessMode: "SINGLE_NODE_WRITER",
		Private: filepath.Join(s.kubelet, "plugins")}
	v.GrowTo = 1 << 30
	got := check.Value(s.admin().GetVolume(t.Context(), &adminv1.GetVolumeRequest{Volume: v.Target}))(t)
	shown := got.GetVolume()
	check.That(t, shown.GetVolumeId() == "vol-1" && shown.GetWay() == "block" && shown.GetRule() == `rule "a"` &&
		shown.GetAccessMode() == "SINGLE_NODE_WRITER" && shown.GetGrowToBytes() == 1<<30 &&
		strings.Contains(shown.GetGrowWaits(), "thenOnHost: allow"), "got %v", shown)
}
