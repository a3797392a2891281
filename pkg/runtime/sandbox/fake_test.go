package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"go.uber.org/goleak"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func onBoth(t *testing.T, test func(t *testing.T, f *fakeRuntime)) {
	t.Run("containerd", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) { test(t, newFakeRuntime("containerd", "v2.4.1")) })
	})
	t.Run("CRI-O", func(t *testing.T) { onCRIO(t, test) })
}

func onCRIO(t *testing.T, test func(t *testing.T, f *fakeRuntime)) {
	synctest.Test(t, func(t *testing.T) { test(t, newFakeRuntime("cri-o", "1.34.1")) })
}

// fakeRuntime is a container runtime. Its connections are in memory, so that tests run in a
// bubble of synctest and wait for nothing.
type fakeRuntime struct {
	runtimeapi.UnimplementedRuntimeServiceServer
	server        *grpc.Server
	log           *zap.Logger
	name, version string
	off           bool // the CRI is not served

	mu         sync.Mutex
	listener   *bufconn.Listener
	lists      atomic.Int32  // how often sandboxes were listed
	hang       chan struct{} // nothing answers until it is closed; nil is at once
	order      int64
	sandboxes  map[string]*runtimeapi.PodSandbox
	processes  map[string]string // the status of a sandbox's process, if it is not deleted; "hangs" is no answer
	asked      atomic.Int32      // how often such a status was asked for
	containers map[string]*runtimeapi.Container
	mounts     map[string][]*runtimeapi.Mount
	vanished   map[string]bool // containers that are listed and then gone
	unreadable map[string]bool // containers whose status cannot be had, and whether that hangs
	forgetful  int             // how many listings are empty, as of a runtime that has not read its state yet
}

func newFakeRuntime(name, version string) *fakeRuntime {
	return &fakeRuntime{
		name: name, version: version, log: zap.NewNop(),
		sandboxes: make(map[string]*runtimeapi.PodSandbox), containers: make(map[string]*runtimeapi.Container),
		mounts: make(map[string][]*runtimeapi.Mount), vanished: make(map[string]bool), processes: make(map[string]string),
		unreadable: make(map[string]bool),
	}
}

func (f *fakeRuntime) start() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.server, f.listener = grpc.NewServer(), bufconn.Listen(64<<10)
	if !f.off {
		runtimeapi.RegisterRuntimeServiceServer(f.server, f)
	}
	go func(s *grpc.Server, l net.Listener) { _ = s.Serve(l) }(f.server, f.listener)
}

func (f *fakeRuntime) stop() { f.server.Stop() }

func (f *fakeRuntime) dial(ctx context.Context, _ string) (net.Conn, error) {
	f.mu.Lock()
	listener := f.listener
	f.mu.Unlock()
	if listener == nil {
		return nil, errors.New("no such socket")
	}
	return listener.DialContext(ctx)
}

// block makes everything hang until the returned function is called.
func (f *fakeRuntime) block() (release func()) {
	hang := make(chan struct{})
	f.mu.Lock()
	defer f.mu.Unlock()
	f.hang = hang
	return sync.OnceFunc(func() { close(hang) })
}

func (f *fakeRuntime) answer(ctx context.Context) error {
	f.mu.Lock()
	hang := f.hang
	f.mu.Unlock()
	if hang != nil {
		select {
		case <-hang:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// journal is what a tracker reported.
type journal struct {
	mu    sync.Mutex
	lines []string
}

func (j *journal) add(line string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.lines = append(j.lines, line)
}

func (j *journal) has(line string) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.Contains(j.lines, line)
}

// track runs a tracker of a node until the test ends.
func track(t *testing.T, f *fakeRuntime, cfg Config) (*Tracker, *journal) {
	t.Helper()
	told := &journal{}
	cfg.Runtime, cfg.Socket = "the container runtime", "/run/fake.sock"
	cfg.OnAdded = func(pod, id string) { told.add("added " + pod + " " + id) }
	cfg.OnGone = func(id string) { told.add("gone " + id) }
	tracker := New(cfg, f.log)
	tracker.dial = f.dial
	t.Cleanup(func() {
		if f.server != nil {
			f.stop()
		}
	})
	check.Running(t, tracker.Run)
	return tracker, told
}

// ready starts a node, and follows it until the first listing has been repeated.
func ready(t *testing.T, f *fakeRuntime) (*Tracker, *journal) {
	t.Helper()
	f.start()
	tracker, told := track(t, f, Config{})
	check.Eventually(t, "ready", tracker.Ready)
	settle()
	return tracker, told
}

func has(tracker *Tracker, pod string, ids ...string) func() bool {
	return func() bool { return slices.Equal(tracker.OfPod(pod), ids) }
}

func (f *fakeRuntime) put(id, pod string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.order++
	f.sandboxes[id] = &runtimeapi.PodSandbox{
		Id: id, Metadata: &runtimeapi.PodSandboxMetadata{Uid: pod}, State: runtimeapi.PodSandboxState_SANDBOX_READY, CreatedAt: f.order,
	}
}

func (f *fakeRuntime) drop(id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.sandboxes, id)
}

// end makes a sandbox one that is listed and has ended.
func (f *fakeRuntime) end(id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	ended := proto.CloneOf(f.sandboxes[id]) // the old one may be on its way
	ended.State = runtimeapi.PodSandboxState_SANDBOX_NOTREADY
	f.sandboxes[id] = ended
}

// mount is a container's mount: a host path, and where it is.
type mount struct{ source, destination string }

func (f *fakeRuntime) contain(id, sandbox string, mounts ...mount) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.containers[id] = &runtimeapi.Container{Id: id, PodSandboxId: sandbox}
	for _, m := range mounts {
		f.mounts[id] = append(f.mounts[id], &runtimeapi.Mount{HostPath: m.source, ContainerPath: m.destination})
	}
}

func (f *fakeRuntime) Version(context.Context, *runtimeapi.VersionRequest) (*runtimeapi.VersionResponse, error) {
	return &runtimeapi.VersionResponse{RuntimeName: f.name, RuntimeVersion: f.version, RuntimeApiVersion: "v1"}, nil
}

func (f *fakeRuntime) ListPodSandbox(ctx context.Context, _ *runtimeapi.ListPodSandboxRequest) (*runtimeapi.ListPodSandboxResponse, error) {
	if err := f.answer(ctx); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lists.Add(1)
	reply := &runtimeapi.ListPodSandboxResponse{}
	if f.forgetful > 0 {
		f.forgetful--
		return reply, nil
	}
	reply.Items = slices.SortedFunc(maps.Values(f.sandboxes), func(a, b *runtimeapi.PodSandbox) int { return cmp.Compare(a.CreatedAt, b.CreatedAt) })
	return reply, nil
}

// PodSandboxStatus answers as containerd does.
func (f *fakeRuntime) PodSandboxStatus(ctx context.Context, req *runtimeapi.PodSandboxStatusRequest) (*runtimeapi.PodSandboxStatusResponse, error) {
	if err := f.answer(ctx); err != nil {
		return nil, err
	}
	f.mu.Lock()
	f.asked.Add(1)
	process, listed := cmp.Or(f.processes[req.GetPodSandboxId()], "deleted"), f.sandboxes[req.GetPodSandboxId()] != nil
	f.mu.Unlock()
	switch {
	case !listed:
		return nil, status.Error(codes.NotFound, "no such sandbox")
	case process == "hangs":
		<-ctx.Done()
		return nil, ctx.Err()
	case process == "shimless":
		return nil, status.Error(codes.Unavailable, "the shim's connection is closed")
	}
	state := runtimeapi.PodSandboxState_SANDBOX_NOTREADY
	if process == "unasked" { // a VM that lives, of which the shim gives no process
		state = runtimeapi.PodSandboxState_SANDBOX_READY
	}
	if process == "none" || process == "unasked" {
		process = ""
	}
	return &runtimeapi.PodSandboxStatusResponse{Status: &runtimeapi.PodSandboxStatus{State: state}, Info: map[string]string{"info": fmt.Sprintf(`{"pid":0,"processStatus":%q}`, process)}}, nil
}

func (f *fakeRuntime) ListContainers(ctx context.Context, req *runtimeapi.ListContainersRequest) (*runtimeapi.ListContainersResponse, error) {
	if err := f.answer(ctx); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	reply := &runtimeapi.ListContainersResponse{}
	for _, c := range f.containers {
		if req.GetFilter() == nil || c.PodSandboxId == req.GetFilter().GetPodSandboxId() {
			reply.Containers = append(reply.Containers, c)
		}
	}
	return reply, nil
}

func (f *fakeRuntime) ContainerStatus(ctx context.Context, req *runtimeapi.ContainerStatusRequest) (*runtimeapi.ContainerStatusResponse, error) {
	if err := f.answer(ctx); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if hangs, bad := f.unreadable[req.GetContainerId()]; hangs {
		f.mu.Unlock()
		<-ctx.Done()
		f.mu.Lock()
		return nil, ctx.Err()
	} else if bad {
		return nil, status.Error(codes.Unknown, "its files cannot be read")
	}
	if f.vanished[req.GetContainerId()] {
		return nil, status.Error(codes.NotFound, "no such container")
	}
	return &runtimeapi.ContainerStatusResponse{
		Status: &runtimeapi.ContainerStatus{Id: req.GetContainerId(), Mounts: f.mounts[req.GetContainerId()]},
	}, nil
}
