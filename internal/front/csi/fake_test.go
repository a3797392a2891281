package csi

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/disk/superblock"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/decision"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/stats"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/check/rpctest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const driverName = "block.example.com"

// fakeDriver is a node plugin over a real socket. It places what it is asked to
// place, as empty files and directories, and remembers the calls.
type fakeDriver struct {
	csi.UnimplementedNodeServer
	mu    sync.Mutex
	calls []string
	asked map[string]proto.Message // the last request of each method
	fails map[string]error         // by method, until removed
	caps  []csi.NodeServiceCapability_RPC_Type
	// device is the size that a grown device gets; answer is the native answer.
	answer *csidefer.Mount
	grown  func()
	block  chan struct{} // publishes wait for it, where it is set
	// wrongly makes what is no device where it is asked to publish one.
	wrongly func(path string) error
	health  codes.Code // of a health call without a volume; OK: the driver has no health calls
	faults  []*healthEntry
	staged  func() // it is called by each stage, where it is set
	// published is what a publish ends with, where it is set.
	published func() error
}

func (d *fakeDriver) NodeGetVolumeHealth(_ context.Context, req *csi.NodeGetVolumeHealthRequest) (*csi.NodeGetVolumeHealthResponse, error) {
	if d.health == codes.OK {
		return nil, status.Error(codes.Unimplemented, "")
	}
	if req.GetVolumeId() == "" {
		return nil, status.Error(d.health, "volume_id is missing")
	}
	return &csi.NodeGetVolumeHealthResponse{VolumeHealth: &csi.VolumeHealth{
		VolumeId: req.GetVolumeId(), HealthStatuses: d.faults,
	}}, d.note("health", req.GetVolumePublishPath(), req)
}

func (d *fakeDriver) NodeGetStorageHealth(context.Context, *csi.NodeGetStorageHealthRequest) (*csi.NodeGetStorageHealthResponse, error) {
	return &csi.NodeGetStorageHealthResponse{BackendHealth: []*csi.NodeGetStorageHealthResponse_StorageBackendHealth{
		{Status: csi.StorageHealthErrorType_STORAGE_DEGRADED, Reason: "PathLost"},
	}}, d.note("storage-health", "", nil)
}

func (d *fakeDriver) note(method, where string, req proto.Message) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.calls = append(d.calls, method+" "+where)
	if d.asked == nil {
		d.asked = make(map[string]proto.Message)
	}
	d.asked[method] = req
	return d.fails[method]
}

func (d *fakeDriver) fail(method string, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.fails == nil {
		d.fails = make(map[string]error)
	}
	d.fails[method] = err
}

// said gives the calls since it was asked last.
func (d *fakeDriver) said() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := d.calls
	d.calls = nil
	return out
}

func (d *fakeDriver) last(method string) proto.Message {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.asked[method]
}

func (d *fakeDriver) setCaps(caps ...csi.NodeServiceCapability_RPC_Type) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.caps = caps
}

func (d *fakeDriver) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return reports(d.caps...), nil
}

func reports(kinds ...csi.NodeServiceCapability_RPC_Type) *csi.NodeGetCapabilitiesResponse {
	reply := &csi.NodeGetCapabilitiesResponse{}
	for _, kind := range kinds {
		has := &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: kind}}
		reply.Capabilities = append(reply.Capabilities, &csi.NodeServiceCapability{Type: has})
	}
	return reply
}

func kindOf(c *csi.VolumeCapability) string {
	if c.GetBlock() != nil {
		return "block"
	}
	return "mount"
}

func (d *fakeDriver) NodeStageVolume(_ context.Context, req *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	if d.staged != nil {
		d.staged()
	}
	return &csi.NodeStageVolumeResponse{}, d.note("stage-"+kindOf(req.GetVolumeCapability()), req.GetStagingTargetPath(), req)
}

func (d *fakeDriver) NodeUnstageVolume(_ context.Context, req *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	return &csi.NodeUnstageVolumeResponse{}, d.note("unstage", req.GetStagingTargetPath(), req)
}

func (d *fakeDriver) NodePublishVolume(ctx context.Context, req *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	method := "publish-" + kindOf(req.GetVolumeCapability())
	if csidefer.Requested(req) {
		method = "publish-deferred"
	}
	if err := d.note(method, req.GetTargetPath(), req); err != nil {
		return nil, err
	}
	if method == "publish-block" && req.GetReadonly() {
		return nil, status.Error(codes.Internal, "read only is not supported for block volumes")
	}
	if d.wrongly != nil && method == "publish-block" {
		return &csi.NodePublishVolumeResponse{}, d.wrongly(req.GetTargetPath())
	}
	if d.block != nil {
		select {
		case <-d.block:
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		}
	}
	if d.published != nil {
		return nil, d.published()
	}
	reply := &csi.NodePublishVolumeResponse{}
	if method == "publish-deferred" && d.answer != nil {
		csidefer.Respond(reply, *d.answer)
	}
	if method == "publish-block" {
		return reply, os.WriteFile(req.GetTargetPath(), nil, 0o600)
	}
	return reply, nil
}

func (d *fakeDriver) NodeUnpublishVolume(_ context.Context, req *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	if err := d.note("unpublish", req.GetTargetPath(), req); err != nil {
		return nil, err
	}
	if err := os.Remove(req.GetTargetPath()); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, status.Error(codes.Internal, err.Error())
	}
	return &csi.NodeUnpublishVolumeResponse{}, nil
}

func (d *fakeDriver) NodeGetVolumeStats(_ context.Context, req *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{{Total: 1}}}, d.note("stats", req.GetVolumePath(), req)
}

func (d *fakeDriver) NodeExpandVolume(_ context.Context, req *csi.NodeExpandVolumeRequest) (*csi.NodeExpandVolumeResponse, error) {
	if err := d.note("expand-"+kindOf(req.GetVolumeCapability()), req.GetVolumePath(), req); err != nil {
		return nil, err
	}
	if d.grown != nil {
		d.grown()
	}
	return &csi.NodeExpandVolumeResponse{CapacityBytes: req.GetCapacityRange().GetRequiredBytes()}, nil
}

// fakeBroker is the broker without a kernel.
type fakeBroker struct {
	found     func() // it is called by each Get, where it is set
	mu        sync.Mutex
	root      string
	volumes   map[string]*volume.Volume
	asked     volume.Instruction
	stageErr  error
	findErr   error
	bound     map[string]string // targets that a sandbox has
	removing  map[string]bool   // targets whose removal was begun
	abilities deferral.Abilities
	// hostMounts is a handler for whose sandboxes this node's kernel mounts.
	hostMounts string
	size       int64
	growErr    error
}

func (b *fakeBroker) Defer(_ context.Context, in volume.Instruction) (*volume.Volume, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.asked = in
	if err := deferral.Validate(&in); err != nil {
		return nil, err
	}
	if b.stageErr != nil {
		return nil, b.stageErr
	}
	v := &volume.Volume{FSType: in.FSType,
		Key: volume.KeyOf(in.Target), Target: in.Target, Driver: in.Driver, Origin: in.Origin, Handler: cmp.Or(in.Handler, "kata"),
		Group: in.Group, GroupPolicy: in.GroupPolicy, KeepSize: in.KeepSize, MountFlags: in.MountFlags,
		ReadOnly: slices.Contains(in.MountFlags, "ro"), Device: volume.Device{Path: "/dev/fake"},
	}
	b.volumes[in.Target] = v
	return v, nil
}

func (b *fakeBroker) Release(_ context.Context, target string) (*volume.Volume, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !strings.HasPrefix(target, b.root+"/") {
		return nil, volume.Errorf(volume.Invalid, "not below the kubelet root")
	}
	v := b.volumes[target]
	if v != nil && b.bound[target] != "" {
		return v, volume.Errorf(volume.Busy, "volume %s: the sandbox %s has it", target, b.bound[target])
	}
	delete(b.volumes, target)
	delete(b.removing, target)
	return v, nil
}

func (b *fakeBroker) Get(key volume.Key) (deferral.Status, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.found != nil {
		b.found()
	}
	for target, v := range b.volumes {
		if volume.KeyOf(target) == key {
			return deferral.Status{Volume: v, Removing: b.removing[target]}, true
		}
	}
	return deferral.Status{}, false
}

func (b *fakeBroker) Users() deferral.Users { return deferral.Users{} }

func (b *fakeBroker) where(is func(*volume.Volume) bool) (out []deferral.Status) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, v := range b.volumes {
		if is(v) {
			out = append(out, deferral.Status{Volume: v, Removing: b.removing[v.Target]})
		}
	}
	return out
}

func (b *fakeBroker) OfOrigin(driver, id string) []deferral.Status {
	return b.where(func(v *volume.Volume) bool { return v.Origin != nil && v.Driver == driver && v.Origin.VolumeID == id })
}

func (b *fakeBroker) Lost() []deferral.Status {
	return b.where(func(v *volume.Volume) bool { return v.Origin == nil })
}

func (b *fakeBroker) DeviceSize(*volume.Volume) (int64, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.size, b.size > 0
}

func (b *fakeBroker) GrowAtMount(_ context.Context, key volume.Key, size int64) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, v := range b.volumes {
		if v.Key == key {
			v.GrowTo = size
		}
	}
	return b.growErr
}

func (b *fakeBroker) KeyOfTarget(target string) (volume.Key, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return volume.KeyOf(target), b.findErr
}

func (b *fakeBroker) Abilities(handler string) deferral.Abilities {
	out := b.abilities
	out.HostMounts = out.HostMounts || b.hostMounts != "" && handler == b.hostMounts
	return out
}

// fakeSandboxes answer for the targets that are bound.
type fakeSandboxes struct {
	broker *fakeBroker
	known  *stats.Known
	err    error
	health *volume.Condition
	hangs  chan struct{} // where it is set, stats wait for it
}

func (s *fakeSandboxes) has(v *volume.Volume) bool {
	s.broker.mu.Lock()
	defer s.broker.mu.Unlock()
	return s.broker.bound[v.Target] != ""
}

func (s *fakeSandboxes) MayRun(_ context.Context, v *volume.Volume) bool { return s.has(v) }

func (s *fakeSandboxes) Stats(ctx context.Context, v *volume.Volume) (stats.Answer, error) {
	if s.hangs != nil {
		select {
		case <-s.hangs:
		case <-ctx.Done():
			return stats.Answer{}, volume.Errorf(volume.Timeout, "volume %s: hangs", v.Target)
		}
	}
	if !s.has(v) {
		return stats.Answer{}, volume.Errorf(volume.NoSandbox, "volume %s has no sandbox", v.Target)
	}
	usage := volume.Usage{Total: 10, Used: 4, Available: 6, Unit: volume.UnitBytes}
	return stats.Answer{Report: volume.Report{Usage: []volume.Usage{usage}, Condition: s.health}}, s.err
}

func (s *fakeSandboxes) Known(*volume.Volume) (stats.Known, bool) {
	if s.known == nil {
		return stats.Known{}, false
	}
	return *s.known, true
}

func (s *fakeSandboxes) Expand(_ context.Context, v *volume.Volume, wish volume.Range) (int64, error) {
	if !s.has(v) {
		return 0, volume.Errorf(volume.NoSandbox, "volume %s has no sandbox", v.Target)
	}
	if wish.Required > s.broker.size {
		return 0, volume.Errorf(volume.OutOfRange, "volume %s: its device has %d bytes", v.Target, s.broker.size)
	}
	return wish.Required, s.err
}

// fakePods knows the pods that a test made.
type fakePods map[string]decision.Pod

func (p fakePods) ByUID(_ context.Context, uid string) (decision.Pod, error) {
	pod, ok := p[uid]
	if !ok {
		return decision.Pod{}, volume.Errorf(volume.Busy, "pod %s is not known", uid)
	}
	return withVolume(pod), nil
}

// withVolume gives a pod the volume of the tests, unless it has volumes.
func withVolume(pod decision.Pod) decision.Pod {
	if pod.Volumes == nil {
		pod.Volumes = []decision.PodVolume{{Name: "data", Driver: driverName, VolumeID: "vol-1"}}
	}
	return pod
}

func (p fakePods) Using(context.Context, string, string) ([]decision.Pod, error) {
	var all []decision.Pod
	for _, pod := range p {
		all = append(all, withVolume(pod))
	}
	slices.SortFunc(all, func(a, b decision.Pod) int { return strings.Compare(a.UID, b.UID) })
	return all, nil
}

// rig is a front between a client in kubelet's place and a fake driver.
type rig struct {
	t         *testing.T
	dir       string
	driver    *fakeDriver
	broker    *fakeBroker
	sandboxes *fakeSandboxes
	cfg       Config
	front     *Front
	kubelet   csi.NodeClient
	stop      func()
	observed  observed
	lacks     bool // the filesystem's root is not writable for the group
	// filesystem is the size of every volume's filesystem; 0 means that it is not known.
	filesystem int64
	header     int64 // of every volume's device
	// writing is set while mkfs writes to the device.
	writing    error
	calls      *telemetry.Interceptors          // may be nil
	registered *csi.NodeGetCapabilitiesResponse // by the driver when it was registered, or nil
}

// Writing implements Disks.
func (r *rig) Writing(string, string) error { return r.writing }

// FillsDevice implements Disks.
func (r *rig) FillsDevice(_ *volume.Volume, size int64) bool {
	return (&superblock.Super{Bytes: r.filesystem}).Fills(size)
}

// HeaderSize implements Disks.
func (r *rig) HeaderSize(*volume.Volume) int64 { return r.header }

// LacksGroup implements Disks.
func (r *rig) LacksGroup(*volume.Volume) bool { return r.lacks }

// observed counts what a refusal.Observer is told.
type observed struct {
	mu      sync.Mutex
	refused map[refusal.Party]int
	changes int
}

// Refused implements refusal.Observer.
func (o *observed) Refused(r *refusal.Refusal) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.refused == nil {
		o.refused = make(map[refusal.Party]int)
	}
	if r.Driver == driverName {
		o.refused[r.Party]++
	}
}

// Changed implements refusal.Observer.
func (o *observed) Changed(volume.Key) { o.mu.Lock(); o.changes++; o.mu.Unlock() }

var deferAll = &policy.Policy{Rules: []policy.Rule{{Name: "all", Defer: true}}}

// deferThenHost lets the host mount a volume after a sandbox.
var deferThenHost = &policy.Policy{Rules: []policy.Rule{{Name: "all", Defer: true, ThenOnHost: policy.HostAllowed}}}

// deferAsked defers no volume of a pod that does not ask, but could.
var deferAsked = &policy.Policy{Rules: []policy.Rule{
	{Name: "who asks", RuntimeHandlers: []string{"kata"}, Annotated: true, Defer: true},
}}

func newRig(t *testing.T, policy *policy.Policy) *rig {
	t.Helper()
	dir := check.ShortDir(t)
	broker := &fakeBroker{root: dir + "/kubelet", volumes: make(map[string]*volume.Volume), bound: make(map[string]string), size: 1 << 30}
	r := &rig{
		t: t, dir: dir, broker: broker, sandboxes: &fakeSandboxes{broker: broker},
		driver: &fakeDriver{caps: []csi.NodeServiceCapability_RPC_Type{csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME}},
	}
	r.cfg = Config{
		Volumes: broker, Sandboxes: r.sandboxes, StateDir: dir + "/state", KubeletRoot: broker.root,
		PrivateDir: broker.root + "/plugins/kubernetes.io/csi/volumeDevices", DefaultFSType: "ext4",
		MarksDir:      broker.root + "/crust-proxy/marks",
		DriverTimeout: 10 * time.Second, Policy: policy, Log: zap.NewNop(),
		Disks: r,
	}
	check.Must(t, os.MkdirAll(broker.root+"/plugins", 0o750))
	server := grpc.NewServer()
	csi.RegisterNodeServer(server, r.driver)
	rpctest.Serve(t, dir+"/driver.sock", server)
	r.start()
	return r
}

// start makes a front over the state that an earlier one left.
func (r *rig) start() {
	r.t.Helper()
	r.cfg.Refusals = refusal.NewList(&r.observed)
	front := check.Value(New(r.cfg))(r.t)
	r.front, front.healthTimeout = front, time.Minute // no test is to meet its end on a busy machine
	upstream := rpctest.Dial(r.t, r.dir+"/driver.sock")
	proxy := front.Driver(driverName, r.registered, upstream)
	socket := fmt.Sprintf("%s/front%d.sock", r.dir, time.Now().UnixNano())
	options := proxy.ServerOptions()
	if r.calls != nil {
		options = append(options, r.calls.Options()...)
	}
	r.stop = rpctest.Serve(r.t, socket, grpc.NewServer(options...))
	r.kubelet = csi.NewNodeClient(rpctest.Dial(r.t, socket))
}

// restart is a crust-proxy that was killed: only files are left of it.
func (r *rig) restart() {
	r.t.Helper()
	r.stop()
	r.start()
}

func mountCap(mode csi.VolumeCapability_AccessMode_Mode, fsType string, flags ...string) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: fsType, MountFlags: flags}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode},
	}
}

var rwo = csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
var inlineID = "csi-" + strings.Repeat("0a", 32) // in kubelet's form

func (r *rig) staging() string {
	return r.broker.root + "/plugins/kubernetes.io/csi/" + driverName + "/x/globalmount"
}

func (r *rig) target(pod string) string {
	return r.broker.root + "/pods/" + pod + "/volumes/kubernetes.io~csi/pv1/mount"
}

func (r *rig) stageReq() *csi.NodeStageVolumeRequest {
	return &csi.NodeStageVolumeRequest{VolumeId: "vol-1", StagingTargetPath: r.staging(), VolumeCapability: mountCap(rwo, "ext4")}
}

func (r *rig) publishReq(pod string) *csi.NodePublishVolumeRequest {
	return &csi.NodePublishVolumeRequest{
		VolumeId: "vol-1", StagingTargetPath: r.staging(), TargetPath: r.target(pod), VolumeCapability: mountCap(rwo, "ext4"),
		VolumeContext: map[string]string{decision.PodUIDKey: pod},
	}
}

func (r *rig) ok(_ any, err error) {
	r.t.Helper()
	check.Must(r.t, err)
}

func (r *rig) refused(err error, code codes.Code, words ...string) {
	r.t.Helper()
	check.Code(r.t, err, code, words...)
}

// askCapabilities is what kubelet does before each stage and publish.
func (r *rig) askCapabilities() {
	r.t.Helper()
	r.ok(r.kubelet.NodeGetCapabilities(r.t.Context(), &csi.NodeGetCapabilitiesRequest{}))
}

func (r *rig) tryStage(req *csi.NodeStageVolumeRequest) error {
	r.t.Helper()
	r.askCapabilities()
	_, err := r.kubelet.NodeStageVolume(r.t.Context(), req)
	return err
}

func (r *rig) stage()   { r.t.Helper(); r.ok(nil, r.tryStage(r.stageReq())) }
func (r *rig) unstage() { r.t.Helper(); r.ok(nil, r.tryUnstage()) }

func (r *rig) tryUnstage() error {
	_, err := r.kubelet.NodeUnstageVolume(r.t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: "vol-1", StagingTargetPath: r.staging()})
	return err
}

func (r *rig) publish(pod string) error { return r.tryPublish(r.publishReq(pod)) }

func (r *rig) tryPublish(req *csi.NodePublishVolumeRequest) error {
	_, err := r.kubelet.NodePublishVolume(r.t.Context(), req)
	return err
}

func (r *rig) expand(pod string) error {
	_, err := r.kubelet.NodeExpandVolume(r.t.Context(), &csi.NodeExpandVolumeRequest{VolumeId: "vol-1", VolumePath: r.target(pod)})
	return err
}

// grow asks for 2 GiB for p1, as kubelet does.
func (r *rig) grow() error {
	reply, err := r.kubelet.NodeExpandVolume(r.t.Context(), &csi.NodeExpandVolumeRequest{
		VolumeId: "vol-1", VolumePath: r.target("p1"), VolumeCapability: mountCap(rwo, "ext4"), CapacityRange: &csi.CapacityRange{RequiredBytes: 2 << 30},
	})
	check.That(r.t, err != nil || reply.GetCapacityBytes() == 2<<30, "kubelet was told of %d bytes", reply.GetCapacityBytes())
	return err
}

// begin stages the volume and publishes it for a pod.
func (r *rig) begin(pod string) {
	r.t.Helper()
	r.stage()
	r.ok(nil, r.publish(pod))
}

// growing is a driver that can grow devices, and has the volume published for p1.
func growing(t *testing.T) *rig {
	t.Helper()
	r := newRig(t, deferAll)
	r.driver.setCaps(csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME, csi.NodeServiceCapability_RPC_EXPAND_VOLUME)
	r.begin("p1")
	r.driver.said()
	return r
}

// end undoes begin, after which nothing is left.
func (r *rig) end(pod string) {
	r.t.Helper()
	r.ok(nil, r.unpublish(pod))
	r.unstage()
	r.clean()
}

func (r *rig) unpublish(pod string) error {
	_, err := r.kubelet.NodeUnpublishVolume(r.t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: "vol-1", TargetPath: r.target(pod)})
	return err
}

// said asserts the driver's calls, whose paths may be shortened to "private" and "kubelet".
func (r *rig) said(want ...string) {
	r.t.Helper()
	var got []string
	for _, call := range r.driver.said() {
		method, where, _ := strings.Cut(call, " ")
		place := "kubelet"
		if strings.Contains(where, "/volumeDevices/") && !strings.HasPrefix(where, r.rawStaging()) || strings.Contains(where, "/crust-proxy.dev/") {
			place = "private"
		}
		got = append(got, method+" "+place)
	}
	check.That(r.t, slices.Equal(got, want), "the driver was asked for %q, want %q", got, want)
}

// clean asserts that nothing is left of any volume.
func (r *rig) clean() {
	r.t.Helper()
	var left []string
	for _, dir := range []string{r.cfg.StateDir, r.cfg.PrivateDir + "/staging", r.cfg.PrivateDir + "/publish"} {
		_ = filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
			if err == nil && path != dir && path != r.cfg.StateDir+"/csi" {
				left = append(left, path)
			}
			return nil
		})
	}
	check.That(r.t, len(left) == 0 && len(r.broker.volumes) == 0, "left: %q, %d volumes", left, len(r.broker.volumes))
}

func files(t *testing.T, dir string) []string {
	t.Helper()
	var names []string
	err := filepath.WalkDir(dir, func(path string, entry os.DirEntry, err error) error {
		if err == nil && !entry.IsDir() {
			names = append(names, path)
		}
		return err
	})
	check.Require(t, err == nil && len(names) > 0, "no files in %s: %v", dir, err)
	return names
}

func codeOf(err error) codes.Code { return status.Code(err) }
