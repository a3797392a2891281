package sandbox

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// fakeRuntime answers the CRI as CRI-O does, on a real socket.
type fakeRuntime struct {
	runtimeapi.UnimplementedRuntimeServiceServer
	t             *testing.T
	socket        string
	server        *grpc.Server
	name, version string
	noEvents      error // what the event stream ends with at once, if anything
	endsAtOnce    bool

	mu         sync.Mutex
	order      int64
	sandboxes  map[string]*runtimeapi.PodSandbox
	containers map[string]*runtimeapi.Container
	mounts     map[string][]*runtimeapi.Mount
	vanished   map[string]bool // containers that are listed and then gone
	hang       chan struct{}   // closed when answers may go on; nil is at once
	lists      int
	forgetful  int // how many listings are empty, as of a runtime that has not read its state yet

	streamsMu sync.Mutex
	streams   map[chan *runtimeapi.ContainerEventResponse]bool
	streamed  int // streams that were ever opened
}

func newFakeRuntime(t *testing.T) *fakeRuntime {
	t.Helper()
	dir, err := os.MkdirTemp("", "cri")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return &fakeRuntime{
		t: t, socket: filepath.Join(dir, "r.sock"), name: "cri-o", version: "1.34.1",
		sandboxes: make(map[string]*runtimeapi.PodSandbox), containers: make(map[string]*runtimeapi.Container),
		mounts: make(map[string][]*runtimeapi.Mount), vanished: make(map[string]bool),
		streams: make(map[chan *runtimeapi.ContainerEventResponse]bool),
	}
}

func (f *fakeRuntime) start() {
	f.t.Helper()
	_ = os.Remove(f.socket)
	listener, err := net.Listen("unix", f.socket)
	if err != nil {
		f.t.Fatal(err)
	}
	f.server = grpc.NewServer()
	runtimeapi.RegisterRuntimeServiceServer(f.server, f)
	go func(s *grpc.Server) { _ = s.Serve(listener) }(f.server)
}

func (f *fakeRuntime) stop() { f.server.Stop() }

// put makes a ready sandbox without an event.
func (f *fakeRuntime) put(id, pod, handler string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.order++
	f.sandboxes[id] = &runtimeapi.PodSandbox{
		Id: id, Metadata: &runtimeapi.PodSandboxMetadata{Uid: pod}, State: runtimeapi.PodSandboxState_SANDBOX_READY,
		CreatedAt: f.order, RuntimeHandler: handler,
	}
}

// end makes a sandbox one that ended, without an event.
func (f *fakeRuntime) end(id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	ended, ok := proto.Clone(f.sandboxes[id]).(*runtimeapi.PodSandbox) // the old one may be on its way
	if !ok {
		f.t.Error("not a sandbox")
		return
	}
	ended.State = runtimeapi.PodSandboxState_SANDBOX_NOTREADY
	f.sandboxes[id] = ended
}

func (f *fakeRuntime) contain(id, sandbox string, mounts ...*runtimeapi.Mount) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.containers[id] = &runtimeapi.Container{Id: id, PodSandboxId: sandbox}
	f.mounts[id] = mounts
}

// tell sends the event of a sandbox's own container.
func (f *fakeRuntime) tell(id string, kind runtimeapi.ContainerEventType) {
	f.mu.Lock()
	event := &runtimeapi.ContainerEventResponse{ContainerId: id, ContainerEventType: kind}
	if s := f.sandboxes[id]; s != nil {
		event.PodSandboxStatus = &runtimeapi.PodSandboxStatus{Id: id, Metadata: s.Metadata, State: s.State}
	}
	f.mu.Unlock()
	f.tellOf(event)
}

func (f *fakeRuntime) tellOf(event *runtimeapi.ContainerEventResponse) {
	f.streamsMu.Lock()
	defer f.streamsMu.Unlock()
	for stream := range f.streams {
		stream <- event
	}
}

func (f *fakeRuntime) listings() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.lists
}

// setEvents turns events on or off, as a restart with another configuration does. To turn
// them off ends the streams.
func (f *fakeRuntime) setEvents(on bool) {
	f.streamsMu.Lock()
	defer f.streamsMu.Unlock()
	f.endsAtOnce = !on
	if !on {
		for stream := range f.streams {
			close(stream)
			delete(f.streams, stream)
		}
	}
}

func (f *fakeRuntime) listeners() int {
	f.streamsMu.Lock()
	defer f.streamsMu.Unlock()
	return len(f.streams)
}

func (f *fakeRuntime) everStreamed() int {
	f.streamsMu.Lock()
	defer f.streamsMu.Unlock()
	return f.streamed
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
	if hang == nil {
		return nil
	}
	select {
	case <-hang:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (f *fakeRuntime) Version(context.Context, *runtimeapi.VersionRequest) (*runtimeapi.VersionResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return &runtimeapi.VersionResponse{RuntimeName: f.name, RuntimeVersion: f.version, RuntimeApiVersion: "v1"}, nil
}

func (f *fakeRuntime) ListPodSandbox(
	ctx context.Context, req *runtimeapi.ListPodSandboxRequest,
) (*runtimeapi.ListPodSandboxResponse, error) {
	if err := f.answer(ctx); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lists++
	reply := &runtimeapi.ListPodSandboxResponse{}
	if f.forgetful > 0 {
		f.forgetful--
		return reply, nil
	}
	for _, s := range f.sandboxes {
		if s.State == req.GetFilter().GetState().GetState() {
			reply.Items = append(reply.Items, s)
		}
	}
	return reply, nil
}

func (f *fakeRuntime) ListContainers(
	ctx context.Context, req *runtimeapi.ListContainersRequest,
) (*runtimeapi.ListContainersResponse, error) {
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

func (f *fakeRuntime) ContainerStatus(
	ctx context.Context, req *runtimeapi.ContainerStatusRequest,
) (*runtimeapi.ContainerStatusResponse, error) {
	if err := f.answer(ctx); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.vanished[req.GetContainerId()] {
		return nil, status.Error(codes.NotFound, "no such container")
	}
	return &runtimeapi.ContainerStatusResponse{
		Status: &runtimeapi.ContainerStatus{Id: req.GetContainerId(), Mounts: f.mounts[req.GetContainerId()]},
	}, nil
}

func (f *fakeRuntime) GetContainerEvents(
	_ *runtimeapi.GetEventsRequest, stream runtimeapi.RuntimeService_GetContainerEventsServer,
) error {
	events := make(chan *runtimeapi.ContainerEventResponse, 100)
	f.streamsMu.Lock()
	f.streamed++
	endsAtOnce := f.endsAtOnce
	if !endsAtOnce {
		f.streams[events] = true
	}
	f.streamsMu.Unlock()
	defer func() {
		f.streamsMu.Lock()
		defer f.streamsMu.Unlock()
		delete(f.streams, events)
	}()
	if endsAtOnce {
		return f.noEvents
	}
	for {
		select {
		case <-stream.Context().Done():
			return nil
		case event, on := <-events:
			if !on {
				return f.noEvents
			}
			if err := stream.Send(event); err != nil {
				return err
			}
		}
	}
}
