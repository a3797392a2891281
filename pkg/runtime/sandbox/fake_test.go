package sandbox

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"

	eventtypes "github.com/containerd/containerd/api/events"
	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	eventsapi "github.com/containerd/containerd/api/services/events/v1"
	sandboxapi "github.com/containerd/containerd/api/services/sandbox/v1"
	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	versionapi "github.com/containerd/containerd/api/services/version/v1"
	"github.com/containerd/containerd/api/types"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// fakeContainerd answers as containerd does, on a real socket.
type fakeContainerd struct {
	containersapi.UnimplementedContainersServer
	eventsapi.UnimplementedEventsServer
	versionapi.UnimplementedVersionServer
	t      *testing.T
	socket string
	server *grpc.Server

	mu         sync.Mutex
	order      int64
	containers map[string]*containersapi.Container
	states     map[string]tasktypes.Status // of tasks that do not just run
	taskless   map[string]bool
	shimless   map[string]bool // tasks whose shim cannot be reached
	hanging    map[string]bool // containers whose Get does not answer
	version    string
	lists      int      // how often containers were listed
	sandboxers []string // of sandboxes in the sandbox store

	// A lock of its own: whoever tells may have to wait for one who asks.
	streamsMu sync.Mutex
	streams   map[chan *types.Envelope]bool
}

func newFake(t *testing.T) *fakeContainerd {
	t.Helper()
	dir, err := os.MkdirTemp("", "ctd")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return &fakeContainerd{
		t: t, socket: filepath.Join(dir, "c.sock"), version: "v2.4.1", containers: make(map[string]*containersapi.Container),
		states: make(map[string]tasktypes.Status), taskless: make(map[string]bool), shimless: make(map[string]bool),
		streams: make(map[chan *types.Envelope]bool), hanging: make(map[string]bool),
	}
}

func (f *fakeContainerd) start() {
	f.t.Helper()
	_ = os.Remove(f.socket)
	listener, err := net.Listen("unix", f.socket)
	if err != nil {
		f.t.Fatal(err)
	}
	f.server = grpc.NewServer()
	containersapi.RegisterContainersServer(f.server, f)
	tasksapi.RegisterTasksServer(f.server, tasks{fake: f})
	eventsapi.RegisterEventsServer(f.server, f)
	versionapi.RegisterVersionServer(f.server, f)
	sandboxapi.RegisterStoreServer(f.server, store{fake: f})
	go func(s *grpc.Server) { _ = s.Serve(listener) }(f.server)
}

func (f *fakeContainerd) stop() { f.server.Stop() }

// put makes a container without an event.
func (f *fakeContainerd) put(id, pod, kind, sandbox, spec string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.order++
	f.containers[id] = &containersapi.Container{
		ID: id, Labels: map[string]string{kindLabel: kind, podLabel: pod}, Sandbox: sandbox,
		Runtime:   &containersapi.Container_Runtime{Name: "io.containerd.kata.v2"},
		Spec:      &anypb.Any{TypeUrl: "types.containerd.io/opencontainers/runtime-spec/1/Spec", Value: []byte(spec)},
		CreatedAt: &timestamppb.Timestamp{Seconds: f.order},
	}
}

func (f *fakeContainerd) drop(id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.containers, id)
}

// run makes a sandbox and tells of it.
func (f *fakeContainerd) run(id, pod string) {
	f.put(id, pod, kindSandbox, "", "{}")
	f.tell("/tasks/start", &eventtypes.TaskStart{ContainerID: id})
}

func (f *fakeContainerd) tell(topic string, event proto.Message) {
	f.t.Helper()
	raw, err := proto.Marshal(event)
	if err != nil {
		f.t.Fatal(err)
	}
	f.tellRaw("k8s.io", topic, raw)
}

func (f *fakeContainerd) tellRaw(namespace, topic string, raw []byte) {
	f.streamsMu.Lock()
	defer f.streamsMu.Unlock()
	for stream := range f.streams {
		stream <- &types.Envelope{Namespace: namespace, Topic: topic, Event: &anypb.Any{Value: raw}}
	}
}

func (f *fakeContainerd) listings() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.lists
}

func (f *fakeContainerd) subscribed() bool {
	f.streamsMu.Lock()
	defer f.streamsMu.Unlock()
	return len(f.streams) > 0
}

func (f *fakeContainerd) checkNamespace(ctx context.Context) error {
	if md, _ := metadata.FromIncomingContext(ctx); len(md.Get(namespaceHeader)) != 1 || md.Get(namespaceHeader)[0] != "k8s.io" {
		return status.Error(codes.FailedPrecondition, "namespace is required")
	}
	return nil
}

func (f *fakeContainerd) Version(context.Context, *emptypb.Empty) (*versionapi.VersionResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return &versionapi.VersionResponse{Version: f.version}, nil
}

func (f *fakeContainerd) Get(ctx context.Context, req *containersapi.GetContainerRequest) (*containersapi.GetContainerResponse, error) {
	f.mu.Lock()
	hangs, c := f.hanging[req.GetID()], f.containers[req.GetID()]
	f.mu.Unlock()
	if hangs {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if c == nil {
		return nil, status.Error(codes.NotFound, "no such container")
	}
	return &containersapi.GetContainerResponse{Container: c}, f.checkNamespace(ctx)
}

func (f *fakeContainerd) ListStream(
	req *containersapi.ListContainersRequest, stream containersapi.Containers_ListStreamServer,
) error {
	if err := f.checkNamespace(stream.Context()); err != nil {
		return err
	}
	f.mu.Lock()
	f.lists++
	var found []*containersapi.Container
	for _, c := range f.containers {
		filter := req.GetFilters()[0]
		if filter == `labels."`+kindLabel+`"==sandbox` && c.Labels[kindLabel] == kindSandbox ||
			filter == `labels."`+kindLabel+`"!=sandbox` && c.Labels[kindLabel] != kindSandbox ||
			filter == `labels."`+podLabel+`"==`+c.Labels[podLabel] {
			found = append(found, c)
		}
	}
	f.mu.Unlock()
	for _, c := range found {
		if err := stream.Send(&containersapi.ListContainerMessage{Container: c}); err != nil {
			return err
		}
	}
	return nil
}

func (f *fakeContainerd) Subscribe(_ *eventsapi.SubscribeRequest, stream eventsapi.Events_SubscribeServer) error {
	events := make(chan *types.Envelope, 100)
	f.streamsMu.Lock()
	f.streams[events] = true
	f.streamsMu.Unlock()
	defer func() {
		f.streamsMu.Lock()
		defer f.streamsMu.Unlock()
		delete(f.streams, events)
	}()
	for {
		select {
		case <-stream.Context().Done():
			return nil
		case event := <-events:
			if err := stream.Send(event); err != nil {
				return err
			}
		}
	}
}

// tasks is the task service: it shares method names with the container service.
type tasks struct {
	tasksapi.UnimplementedTasksServer
	fake *fakeContainerd
}

func (s tasks) Get(ctx context.Context, req *tasksapi.GetRequest) (*tasksapi.GetResponse, error) {
	f := s.fake
	if err := f.checkNamespace(ctx); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.containers[req.GetContainerID()] == nil || f.taskless[req.GetContainerID()] {
		return nil, status.Error(codes.NotFound, "no such task")
	}
	if f.shimless[req.GetContainerID()] {
		return nil, status.Error(codes.Unavailable, "the shim's connection is closed")
	}
	state, odd := f.states[req.GetContainerID()]
	if !odd {
		state = tasktypes.Status_RUNNING
	}
	return &tasksapi.GetResponse{Process: &tasktypes.Process{ID: req.GetContainerID(), Status: state}}, nil
}

// store is the sandbox store.
type store struct {
	sandboxapi.UnimplementedStoreServer
	fake *fakeContainerd
}

func (s store) List(ctx context.Context, _ *sandboxapi.StoreListRequest) (*sandboxapi.StoreListResponse, error) {
	s.fake.mu.Lock()
	defer s.fake.mu.Unlock()
	reply := &sandboxapi.StoreListResponse{}
	for _, name := range s.fake.sandboxers {
		reply.List = append(reply.List, &types.Sandbox{SandboxID: "sb-" + name, Sandboxer: name})
	}
	return reply, s.fake.checkNamespace(ctx)
}

func connect(t *testing.T, socket string) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	return conn
}
