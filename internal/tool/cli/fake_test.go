package cli

import (
	"bytes"
	"context"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/internal/tool/doctor"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/check/rpctest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var now = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

func before(d time.Duration) *timestamppb.Timestamp { return timestamppb.New(now.Add(-d)) }

const (
	idA = "aa11bb22cc33dd44aa11bb22cc33dd44aa11bb22cc33dd44aa11bb22cc33dd44"
	idB = "bb11bb22cc33dd44aa11bb22cc33dd44aa11bb22cc33dd44aa11bb22cc33dd44"
	idC = "cc11bb22cc33dd44aa11bb22cc33dd44aa11bb22cc33dd44aa11bb22cc33dd44"
)

func volumes() []*adminv1.Volume {
	return []*adminv1.Volume{
		{Id: idA, TargetPath: "/var/lib/kubelet/pods/a/mount", State: adminv1.VolumeState_VOLUME_STATE_BOUND,
			Driver: "ebs.csi.aws.com", Handler: "kata", Device: "/dev/nvme1n1", DeviceId: "block 259:1", FsType: "ext4",
			MountFlags: []string{"noatime", "nodiratime"}, SupplementalGroup: "2000", SupplementalGroupChangePolicy: "OnRootMismatch",
			VolumeId: "vol-0a1b", AccessMode: "SINGLE_NODE_WRITER", Rule: `rule "disks"`, Way: "block", GrowToBytes: 20 << 30,
			PodUid: "0f0e0d0c-1111", PodNamespace: "shop", PodName: "web-0", PvcName: "data", CreatedAt: before(5 * time.Hour),
			Sandbox: &adminv1.Sandbox{Id: strings.Repeat("5a", 32), Runtime: "kata-go", BoundAt: before(4 * time.Hour)},
			Usage:   usage(), UsageAt: before(45 * time.Second), Condition: &adminv1.VolumeCondition{Message: "OK"}, Snapshots: "as after a crash (the handler kata cannot freeze)"},
		{Id: idB, TargetPath: "/var/lib/kubelet/pods/b/mount", State: adminv1.VolumeState_VOLUME_STATE_PUBLISHED,
			Driver: "lvm", Handler: "crust", Device: "/dev/vg/b", DeviceId: "block 253:2", FsType: "xfs", ReadOnly: true, CreatedAt: before(3 * time.Second), PodUid: "b1b2b3b4-2222", VolumeId: "vol-b"},
		{Id: idC, TargetPath: "/var/lib/kubelet/pods/c/mount\x1b[2J", State: adminv1.VolumeState_VOLUME_STATE_DEGRADED,
			Driver: "lvm", Handler: "kata", Device: "/dev/vg/c", FsType: "ext4", CreatedAt: before(400 * 24 * time.Hour),
			Condition:    &adminv1.VolumeCondition{Abnormal: true, Message: "evil\r\n\x1b]0;owned\a \u202etxt.exe \u009b31m"},
			PodNamespace: "evil", PodName: "c\x1b[2J", PvcName: "c",
			LastError: "sandbox said: \x1b[31mred\nEVENT fake row", LastErrorAt: before(time.Minute)},
	}
}

func usage() []*adminv1.VolumeUsage {
	return []*adminv1.VolumeUsage{
		{Unit: adminv1.VolumeUsage_UNIT_BYTES, Total: 20 << 30, Used: 5 << 29, Available: 35 << 29},
		{Unit: adminv1.VolumeUsage_UNIT_INODES, Total: 1310720, Used: 11, Available: 1310709},
	}
}

// fakeAdmin answers from memory. Its pages hold one volume each, so that every listing has to go on to the last page.
type fakeAdmin struct {
	adminv1.UnimplementedAdminServer
	volumes  []*adminv1.Volume
	asked    int
	findings []string
	started  *timestamppb.Timestamp
	config   string
	repairs  []*adminv1.Repair
	drivers  []*adminv1.Driver
	frontOff bool
	fail     error
	hang     bool
	expanded *adminv1.ExpandVolumeRequest
	frozen   *adminv1.FreezeVolumeRequest
	released *adminv1.ReleaseVolumeRequest
	ended    []int32
	events   *adminv1.ListEventsRequest
	heldBy   string
	later    bool
	// endWatch ends a watch after its events, as a daemon that stops does.
	endWatch    bool
	httpProblem string
	runtime     fakeRuntime
}

type fakeRuntime struct {
	runtimev1.UnimplementedRuntimeServer
	asked proto.Message
	fail  error
}

func (f *fakeRuntime) RuntimeStageVolume(_ context.Context, req *runtimev1.RuntimeStageVolumeRequest) (*runtimev1.RuntimeStageVolumeResponse, error) {
	f.asked = req
	return &runtimev1.RuntimeStageVolumeResponse{}, f.fail
}

func (f *fakeRuntime) RuntimeUnstageVolume(_ context.Context, req *runtimev1.RuntimeUnstageVolumeRequest) (*runtimev1.RuntimeUnstageVolumeResponse, error) {
	f.asked = req
	return &runtimev1.RuntimeUnstageVolumeResponse{}, f.fail
}

func (f *fakeAdmin) check(ctx context.Context) error {
	if f.hang {
		<-ctx.Done()
		return ctx.Err()
	}
	return f.fail
}

func (f *fakeAdmin) GetNode(ctx context.Context, _ *adminv1.GetNodeRequest) (*adminv1.GetNodeResponse, error) {
	f.asked++
	return &adminv1.GetNodeResponse{Version: sys.Version(), Findings: f.findings, Config: f.config, StartedAt: f.started, HttpProblem: f.httpProblem}, f.check(ctx)
}

func (f *fakeAdmin) ListVolumes(ctx context.Context, req *adminv1.ListVolumesRequest) (*adminv1.ListVolumesResponse, error) {
	if err := f.check(ctx); err != nil {
		return nil, err
	}
	var match []*adminv1.Volume
	for _, v := range f.volumes {
		if (req.Driver == "" || v.Driver == req.Driver) && (req.Handler == "" || v.Handler == req.Handler) &&
			(req.State == 0 || v.State == req.State) && v.Id > req.PageToken {
			match = append(match, v)
		}
	}
	page := &adminv1.ListVolumesResponse{Volumes: match}
	if len(match) > 1 {
		page.Volumes, page.NextPageToken = match[:1], match[0].Id
	}
	return page, nil
}

func (f *fakeAdmin) find(name string) (*adminv1.Volume, error) {
	if name == "twice" {
		return nil, status.Error(codes.InvalidArgument, "\"twice\" names 2 volumes:\naa11bb22cc33  pod shop/web-0\nbb11bb22cc33  \x1b[2J")
	}
	for _, v := range f.volumes {
		if slices.Contains([]string{v.TargetPath, v.PodName, v.PvcName, v.PodUid, v.VolumeId, v.PodNamespace + "/" + v.PodName, v.PodNamespace + "/" + v.PvcName}, name) || len(name) >= 6 && strings.HasPrefix(v.Id, name) {
			return v, nil
		}
	}
	return nil, status.Errorf(codes.NotFound, "no volume %q", name)
}

func (f *fakeAdmin) GetVolume(ctx context.Context, req *adminv1.GetVolumeRequest) (*adminv1.GetVolumeResponse, error) {
	if err := f.check(ctx); err != nil {
		return nil, err
	}
	v, err := f.find(req.Volume)
	return &adminv1.GetVolumeResponse{Volume: v}, err
}

func (f *fakeAdmin) GetVolumeStats(ctx context.Context, req *adminv1.GetVolumeStatsRequest) (*adminv1.GetVolumeStatsResponse, error) {
	if err := f.check(ctx); err != nil {
		return nil, err
	}
	v, err := f.find(req.Volume)
	return &adminv1.GetVolumeStatsResponse{Usage: v.GetUsage(), Condition: v.GetCondition(), Sandbox: v.GetSandbox(),
		Took: durationpb.New(1234567 * time.Nanosecond)}, err
}

func (f *fakeAdmin) FreezeVolume(ctx context.Context, req *adminv1.FreezeVolumeRequest) (*adminv1.FreezeVolumeResponse, error) {
	f.frozen = req
	return &adminv1.FreezeVolumeResponse{}, f.check(ctx)
}

func (f *fakeAdmin) EndOrphans(ctx context.Context, req *adminv1.EndOrphansRequest) (*adminv1.EndOrphansResponse, error) {
	f.ended = req.GetPids()
	return &adminv1.EndOrphansResponse{Orphans: []*adminv1.Orphan{{Pid: 4711, Program: "qemu", ControlGroup: "/kata/5a"}}}, f.check(ctx)
}

func (f *fakeAdmin) ExplainPod(ctx context.Context, req *adminv1.ExplainPodRequest) (*adminv1.ExplainPodResponse, error) {
	return &adminv1.ExplainPodResponse{Volumes: []*adminv1.ExplainedVolume{
		{Volume: "data of " + req.GetPod(), Outcome: "refused", Because: []string{`by rule "all"`, "(handler) \x1b[2J\nEVENT fake"}}, {Volume: "logs", Outcome: "on the host"},
	}}, f.check(ctx)
}

func (f *fakeAdmin) ReleaseVolume(ctx context.Context, req *adminv1.ReleaseVolumeRequest) (*adminv1.ReleaseVolumeResponse, error) {
	f.released = req
	return &adminv1.ReleaseVolumeResponse{HeldBy: f.heldBy}, f.check(ctx)
}

func (f *fakeAdmin) ThawVolume(ctx context.Context, _ *adminv1.ThawVolumeRequest) (*adminv1.ThawVolumeResponse, error) {
	return &adminv1.ThawVolumeResponse{}, f.check(ctx)
}

func (f *fakeAdmin) ExpandVolume(ctx context.Context, req *adminv1.ExpandVolumeRequest) (*adminv1.ExpandVolumeResponse, error) {
	f.expanded = req
	return &adminv1.ExpandVolumeResponse{CapacityBytes: 20 << 30, Later: f.later}, f.check(ctx)
}

func (f *fakeAdmin) ListHandlers(ctx context.Context, _ *adminv1.ListHandlersRequest) (*adminv1.ListHandlersResponse, error) {
	return &adminv1.ListHandlersResponse{Handlers: []*adminv1.Handler{
		{Name: "crust", Healthy: false, Problem: "no runtime-cli is allowed;\nallow one"},
		{Name: "kata", Healthy: true, Volumes: 2, Bound: 1},
	}}, f.check(ctx)
}

func (f *fakeAdmin) ListDrivers(ctx context.Context, _ *adminv1.ListDriversRequest) (*adminv1.ListDriversResponse, error) {
	if f.frontOff {
		return &adminv1.ListDriversResponse{}, f.check(ctx)
	}
	return &adminv1.ListDriversResponse{FrontEnabled: true, Drivers: f.drivers}, f.check(ctx)
}

func drivers() []*adminv1.Driver {
	return []*adminv1.Driver{
		{Name: "ebs.csi.aws.com", Version: "v1.40.0", Endpoint: "/var/lib/kubelet/plugins/ebs.csi.aws.com/csi.sock",
			CsiSocket: "/run/crust-proxy/csi/ebs.csi.aws.com.sock", Capabilities: []string{"STAGE_UNSTAGE_VOLUME", "GET_VOLUME_STATS"},
			Mode: "block", Ready: true, Since: before(26 * time.Hour), KubeletStatus: "registered", Volumes: 1},
		{Name: "topolvm.io", Version: "2\x1b[2J", Mode: "native", Problem: "its socket does not answer\nEVENT fake row",
			Since: before(time.Minute), KubeletStatus: "refused\x07", DirectlyRegistered: true},
	}
}

func (f *fakeAdmin) Reconcile(ctx context.Context, _ *adminv1.ReconcileRequest) (*adminv1.ReconcileResponse, error) {
	return &adminv1.ReconcileResponse{Checked: 3, Repairs: f.repairs}, f.check(ctx)
}

func (f *fakeAdmin) WatchVolumes(_ *adminv1.WatchVolumesRequest, stream grpc.ServerStreamingServer[adminv1.WatchVolumesResponse]) error {
	if f.fail != nil {
		return f.fail
	}
	all := f.volumes
	events := []*adminv1.WatchVolumesResponse{
		{Type: adminv1.WatchVolumesResponse_TYPE_CHANGED, Volume: all[0]},
		{Type: adminv1.WatchVolumesResponse_TYPE_CHANGED, Volume: all[1]},
		{Type: adminv1.WatchVolumesResponse_TYPE_SYNCED},
		{Type: adminv1.WatchVolumesResponse_TYPE_CHANGED, Volume: all[2]},
		{Type: adminv1.WatchVolumesResponse_TYPE_REMOVED, Volume: &adminv1.Volume{Id: idA, TargetPath: all[0].TargetPath}},
	}
	for _, e := range events {
		if err := stream.Send(e); err != nil {
			return err
		}
	}
	if f.endWatch {
		return nil
	}
	<-stream.Context().Done()
	return stream.Context().Err()
}

// bench is a fake daemon on a real socket, and a place to run crustctl at it.
type bench struct {
	t      *testing.T
	admin  *fakeAdmin
	socket string
	env    map[string]string
	tty    bool
	width  int
	keys   *os.File
	node   doctor.Node
	asks   runner
}

func newBench(t *testing.T) *bench {
	t.Helper()
	dir := check.ShortDir(t)
	b := &bench{t: t, admin: &fakeAdmin{volumes: volumes(), drivers: drivers()}, socket: filepath.Join(dir, "admin.sock"), env: map[string]string{}, width: 80}
	b.node = doctor.DefaultNode()
	b.node.Root = filepath.Join(dir, "root")
	b.node.AdminSocket, b.node.UID = b.socket, 1000
	return b
}

func (b *bench) serve() *bench {
	b.t.Helper()
	b.serveOn(check.Value(net.Listen("unix", b.socket))(b.t))
	return b
}

func (b *bench) serveOn(l net.Listener) {
	server := grpc.NewServer()
	adminv1.RegisterAdminServer(server, b.admin)
	runtimev1.RegisterRuntimeServer(server, &b.admin.runtime)
	rpctest.ServeOn(b.t, l, server)
}

type result struct {
	code     int
	out, err string
}

func (b *bench) run(args ...string) result {
	b.t.Helper()
	return b.runContext(b.t.Context(), args...)
}

func (b *bench) runContext(ctx context.Context, args ...string) result {
	b.t.Helper()
	var out, errs bytes.Buffer
	code := Run(ctx, args, Env{
		Out: &out, Err: &errs, Terminal: b.tty, Width: b.width, Keys: b.keys, Node: b.node, Run: b.asks,
		Getenv: func(k string) string { return b.env[k] }, Now: func() time.Time { return now },
	})
	return result{code, out.String(), errs.String()}
}
