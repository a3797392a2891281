package sandbox

import (
	"context"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// fakeRuntime answers the CRI as CRI-O does.
type fakeRuntime struct {
	runtimeapi.UnimplementedRuntimeServiceServer
	fakeServer
	events        streams[*runtimeapi.ContainerEventResponse]
	log           *zap.Logger
	name, version string
	noEvents      error // what an event stream ends with

	order      int64
	sandboxes  map[string]*runtimeapi.PodSandbox
	containers map[string]*runtimeapi.Container
	mounts     map[string][]*runtimeapi.Mount
	vanished   map[string]bool // containers that are listed and then gone
	forgetful  int             // how many listings are empty, as of a runtime that has not read its state yet
}

func newFakeRuntime() *fakeRuntime {
	return &fakeRuntime{
		name: "cri-o", version: "1.34.1", log: zap.NewNop(),
		sandboxes: make(map[string]*runtimeapi.PodSandbox), containers: make(map[string]*runtimeapi.Container),
		mounts: make(map[string][]*runtimeapi.Mount), vanished: make(map[string]bool),
	}
}

func (f *fakeRuntime) newTracker(cfg Config) *Tracker { return NewCRI(cfg, f.log) }

func (f *fakeRuntime) start() {
	f.serve(func(s *grpc.Server) { runtimeapi.RegisterRuntimeServiceServer(s, f) })
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

func (f *fakeRuntime) begin(id, pod string) {
	f.put(id, pod)
	f.tell(id, runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT)
}

func (f *fakeRuntime) end(id string) {
	f.unready(id)
	f.tell(id, runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT)
}

// unready makes a sandbox one that ended, without an event.
func (f *fakeRuntime) unready(id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	ended := proto.CloneOf(f.sandboxes[id]) // the old one may be on its way
	ended.State = runtimeapi.PodSandboxState_SANDBOX_NOTREADY
	f.sandboxes[id] = ended
}

func (f *fakeRuntime) contain(id, sandbox string, mounts ...mount) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.containers[id] = &runtimeapi.Container{Id: id, PodSandboxId: sandbox}
	for _, m := range mounts {
		f.mounts[id] = append(f.mounts[id], &runtimeapi.Mount{HostPath: m.Source, ContainerPath: m.Destination})
	}
}

// tell sends the event of a sandbox's own container, without a status if the sandbox is gone.
func (f *fakeRuntime) tell(id string, kind runtimeapi.ContainerEventType) {
	f.mu.Lock()
	event := &runtimeapi.ContainerEventResponse{ContainerId: id, ContainerEventType: kind}
	if s := f.sandboxes[id]; s != nil {
		event.PodSandboxStatus = &runtimeapi.PodSandboxStatus{Id: id, Metadata: s.Metadata, State: s.State}
	}
	f.mu.Unlock()
	f.events.tell(event)
}

func (f *fakeRuntime) Version(context.Context, *runtimeapi.VersionRequest) (*runtimeapi.VersionResponse, error) {
	return &runtimeapi.VersionResponse{RuntimeName: f.name, RuntimeVersion: f.version, RuntimeApiVersion: "v1"}, nil
}

func (f *fakeRuntime) ListPodSandbox(ctx context.Context, req *runtimeapi.ListPodSandboxRequest) (*runtimeapi.ListPodSandboxResponse, error) {
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

func (f *fakeRuntime) ListContainers(_ context.Context, req *runtimeapi.ListContainersRequest) (*runtimeapi.ListContainersResponse, error) {
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
	if f.vanished[req.GetContainerId()] {
		return nil, status.Error(codes.NotFound, "no such container")
	}
	return &runtimeapi.ContainerStatusResponse{
		Status: &runtimeapi.ContainerStatus{Id: req.GetContainerId(), Mounts: f.mounts[req.GetContainerId()]},
	}, nil
}

func (f *fakeRuntime) GetContainerEvents(_ *runtimeapi.GetEventsRequest, stream runtimeapi.RuntimeService_GetContainerEventsServer) error {
	f.events.serve(stream.Context(), stream.Send)
	return f.noEvents
}
