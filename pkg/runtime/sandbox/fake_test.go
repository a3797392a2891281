package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"slices"
	"sync"
	"testing"
	"testing/synctest"

	eventtypes "github.com/containerd/containerd/api/events"
	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	eventsapi "github.com/containerd/containerd/api/services/events/v1"
	sandboxapi "github.com/containerd/containerd/api/services/sandbox/v1"
	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	versionapi "github.com/containerd/containerd/api/services/version/v1"
	"github.com/containerd/containerd/api/types"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// node is a fake container runtime that answers containerd's API or the CRI. Its connections
// are in memory, so that tests run in a bubble of synctest and wait for nothing.
type node interface {
	base() *fakeServer
	start()
	newTracker(Config) *Tracker
	put(id, pod string) // makes a live sandbox, without an event
	drop(id string)     // removes it without one
	begin(id, pod string)
	end(id string)
	contain(id, sandbox string, mounts ...mount)
}

// onBoth runs a test with each kind of node.
func onBoth(t *testing.T, test func(t *testing.T, f node)) {
	t.Run("containerd", func(t *testing.T) { synctest.Test(t, func(t *testing.T) { test(t, newFake()) }) })
	t.Run("CRI", func(t *testing.T) { synctest.Test(t, func(t *testing.T) { test(t, newFakeRuntime()) }) })
}

// fakeServer is what both nodes have.
type fakeServer struct {
	server *grpc.Server

	mu       sync.Mutex
	listener *bufconn.Listener
	lists    int           // how often sandboxes were listed
	hang     chan struct{} // nothing answers until it is closed; nil is at once
}

func (f *fakeServer) base() *fakeServer { return f }

func (f *fakeServer) serve(register func(*grpc.Server)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.server, f.listener = grpc.NewServer(), bufconn.Listen(64<<10)
	register(f.server)
	go func(s *grpc.Server, l net.Listener) { _ = s.Serve(l) }(f.server, f.listener)
}

func (f *fakeServer) stop() { f.server.Stop() }

func (f *fakeServer) dial(ctx context.Context, _ string) (net.Conn, error) {
	f.mu.Lock()
	listener := f.listener
	f.mu.Unlock()
	if listener == nil {
		return nil, errors.New("no such socket")
	}
	return listener.DialContext(ctx)
}

func (f *fakeServer) listings() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.lists
}

// block makes everything hang until the returned function is called.
func (f *fakeServer) block() (release func()) {
	hang := make(chan struct{})
	f.mu.Lock()
	defer f.mu.Unlock()
	f.hang = hang
	return sync.OnceFunc(func() { close(hang) })
}

func (f *fakeServer) answer(ctx context.Context) error {
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
func track(t *testing.T, f node, cfg Config) (*Tracker, *journal) {
	t.Helper()
	told := &journal{}
	cfg.Socket, cfg.Namespace = "/run/fake.sock", "k8s.io"
	cfg.OnAdded = func(pod, id string) { told.add("added " + pod + " " + id) }
	cfg.OnGone = func(id string) { told.add("gone " + id) }
	tracker := f.newTracker(cfg)
	tracker.dial = f.base().dial
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- tracker.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if f.base().server != nil {
			f.base().stop()
		}
	})
	return tracker, told
}

// ready starts a node, and follows it until the first listing has been repeated and events
// are delivered.
func ready(t *testing.T, f node) (*Tracker, *journal) {
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

// streams are the event streams of a node.
type streams[E any] struct {
	mu   sync.Mutex
	open map[chan E]bool
	ever int  // how many were opened
	off  bool // new ones end at once
}

func (s *streams[E]) tell(event E) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for stream := range s.open {
		stream <- event
	}
}

// setOn turns events on or off, as a restart with another configuration does. To turn them
// off ends the streams.
func (s *streams[E]) setOn(on bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.off = !on
	for stream := range s.open {
		if !on {
			close(stream)
			delete(s.open, stream)
		}
	}
}

func (s *streams[E]) counts() (open, ever int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.open), s.ever
}

// serve returns when the stream is closed.
func (s *streams[E]) serve(ctx context.Context, send func(E) error) {
	events := make(chan E, 100)
	s.mu.Lock()
	s.ever++
	if s.off {
		close(events)
	} else {
		if s.open == nil {
			s.open = make(map[chan E]bool)
		}
		s.open[events] = true
	}
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.open, events)
	}()
	for {
		select {
		case <-ctx.Done():
			return
		case event, on := <-events:
			if !on || send(event) != nil {
				return
			}
		}
	}
}

// fakeContainerd answers as containerd does.
type fakeContainerd struct {
	containersapi.UnimplementedContainersServer
	eventsapi.UnimplementedEventsServer
	versionapi.UnimplementedVersionServer
	fakeServer
	events streams[*types.Envelope]
	log    *zap.Logger

	order      int64
	containers map[string]*containersapi.Container
	states     map[string]tasktypes.Status // of tasks that do not just run
	taskless   map[string]bool
	shimless   map[string]bool // tasks whose shim cannot be reached
	hanging    map[string]bool // containers whose Get does not answer
	version    string
	sandboxers []string // of sandboxes in the sandbox store
}

func newFake() *fakeContainerd {
	return &fakeContainerd{
		version: "v2.4.1", log: zap.NewNop(), containers: make(map[string]*containersapi.Container),
		states: make(map[string]tasktypes.Status), taskless: make(map[string]bool), shimless: make(map[string]bool),
		hanging: make(map[string]bool),
	}
}

func (f *fakeContainerd) newTracker(cfg Config) *Tracker { return New(cfg, f.log) }

func (f *fakeContainerd) start() {
	f.serve(func(s *grpc.Server) {
		containersapi.RegisterContainersServer(s, f)
		tasksapi.RegisterTasksServer(s, tasks{fake: f})
		eventsapi.RegisterEventsServer(s, f)
		versionapi.RegisterVersionServer(s, f)
		sandboxapi.RegisterStoreServer(s, store{fake: f})
	})
}

func (f *fakeContainerd) put(id, pod string) { f.make(id, pod, kindSandbox, "", "{}") }

func (f *fakeContainerd) contain(id, sandbox string, mounts ...mount) {
	f.mu.Lock()
	pod := f.containers[sandbox].GetLabels()[podLabel]
	f.mu.Unlock()
	raw, err := json.Marshal(spec{Mounts: mounts})
	if err != nil {
		panic(err)
	}
	f.make(id, pod, "container", sandbox, string(raw))
}

// make makes a container without an event.
func (f *fakeContainerd) make(id, pod, kind, sandbox, spec string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.order++
	f.containers[id] = &containersapi.Container{
		ID: id, Labels: map[string]string{kindLabel: kind, podLabel: pod}, Sandbox: sandbox,
		Spec:      &anypb.Any{TypeUrl: "types.containerd.io/opencontainers/runtime-spec/1/Spec", Value: []byte(spec)},
		CreatedAt: &timestamppb.Timestamp{Seconds: f.order},
	}
}

func (f *fakeContainerd) drop(id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.containers, id)
}

func (f *fakeContainerd) begin(id, pod string) {
	f.put(id, pod)
	f.tell("/tasks/start", &eventtypes.TaskStart{ContainerID: id})
}

func (f *fakeContainerd) end(id string) {
	f.drop(id)
	f.tell("/tasks/exit", &eventtypes.TaskExit{ContainerID: id, ID: id})
}

func (f *fakeContainerd) tell(topic string, event proto.Message) {
	raw, err := proto.Marshal(event)
	if err != nil {
		panic(err)
	}
	f.tellRaw("k8s.io", topic, raw)
}

func (f *fakeContainerd) tellRaw(namespace, topic string, raw []byte) {
	f.events.tell(&types.Envelope{Namespace: namespace, Topic: topic, Event: &anypb.Any{Value: raw}})
}

// allow answers as block says, and wants the namespace.
func (f *fakeContainerd) allow(ctx context.Context) error {
	if md, _ := metadata.FromIncomingContext(ctx); !slices.Equal(md.Get(namespaceHeader), []string{"k8s.io"}) {
		return status.Error(codes.FailedPrecondition, "namespace is required")
	}
	return f.answer(ctx)
}

func (f *fakeContainerd) Version(context.Context, *emptypb.Empty) (*versionapi.VersionResponse, error) {
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
	return &containersapi.GetContainerResponse{Container: c}, f.allow(ctx)
}

func (f *fakeContainerd) ListStream(req *containersapi.ListContainersRequest, stream containersapi.Containers_ListStreamServer) error {
	if err := f.allow(stream.Context()); err != nil {
		return err
	}
	filter := req.GetFilters()[0]
	f.mu.Lock()
	if filter == `labels."`+kindLabel+`"==sandbox` {
		f.lists++
	}
	var found []*containersapi.Container
	for _, c := range f.containers {
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
	f.events.serve(stream.Context(), stream.Send)
	return nil
}

// tasks is the task service: it shares method names with the container service.
type tasks struct {
	tasksapi.UnimplementedTasksServer
	fake *fakeContainerd
}

func (s tasks) Get(ctx context.Context, req *tasksapi.GetRequest) (*tasksapi.GetResponse, error) {
	f, id := s.fake, req.GetContainerID()
	if err := f.allow(ctx); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.containers[id] == nil || f.taskless[id] {
		return nil, status.Error(codes.NotFound, "no such task")
	}
	if f.shimless[id] {
		return nil, status.Error(codes.Unavailable, "the shim's connection is closed")
	}
	state, odd := f.states[id]
	if !odd {
		state = tasktypes.Status_RUNNING
	}
	return &tasksapi.GetResponse{Process: &tasktypes.Process{ID: id, Status: state}}, nil
}

// store is the sandbox store.
type store struct {
	sandboxapi.UnimplementedStoreServer
	fake *fakeContainerd
}

func (s store) List(ctx context.Context, _ *sandboxapi.StoreListRequest) (*sandboxapi.StoreListResponse, error) {
	reply := &sandboxapi.StoreListResponse{}
	for _, name := range s.fake.sandboxers {
		reply.List = append(reply.List, &types.Sandbox{SandboxID: "sb-" + name, Sandboxer: name})
	}
	return reply, s.fake.allow(ctx)
}
