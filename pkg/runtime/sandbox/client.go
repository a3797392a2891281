package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	eventsapi "github.com/containerd/containerd/api/services/events/v1"
	sandboxapi "github.com/containerd/containerd/api/services/sandbox/v1"
	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	versionapi "github.com/containerd/containerd/api/services/version/v1"
	"github.com/containerd/containerd/api/types"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// The labels of containerd's CRI plugin, the same since 1.0.
const (
	kindLabel   = "io.cri-containerd.kind"
	kindSandbox = "sandbox"
	podLabel    = "io.kubernetes.pod.uid"
	// namespaceHeader names the namespace of a call.
	namespaceHeader = "containerd-namespace"
)

const (
	// listTime bounds a whole listing.
	listTime = 30 * time.Second
	// stateTime bounds one query of a task. Containerd itself waits two seconds for a shim.
	stateTime = 5 * time.Second
	// stateAtOnce is how many tasks are queried at once: shims that hang must not make a
	// listing last for ever.
	stateAtOnce = 16
)

// client queries containerd over one connection.
//
// It uses the generated code of containerd's gRPC API and not the client library: to list
// containers and read events takes a tenth of that code, and the API does not change.
type client struct {
	t          *Tracker
	containers containersapi.ContainersClient
	tasks      tasksapi.TasksClient
	events     eventsapi.EventsClient
	sandboxes  sandboxapi.StoreClient
	versions   versionapi.VersionClient
}

func newClient(t *Tracker, conn *grpc.ClientConn) *client {
	return &client{
		t: t, containers: containersapi.NewContainersClient(conn), tasks: tasksapi.NewTasksClient(conn),
		events: eventsapi.NewEventsClient(conn), sandboxes: sandboxapi.NewStoreClient(conn),
		versions: versionapi.NewVersionClient(conn),
	}
}

// checkVersion returns an error if containerd is too old.
func (c *client) checkVersion(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, listTime)
	defer cancel()
	reply, err := c.versions.Version(ctx, &emptypb.Empty{})
	if err != nil {
		return fmt.Errorf("containerd: ask for the version: %w", err)
	}
	return checkSupported(reply.GetVersion())
}

// checkSupported returns an error if a version of containerd is too old. A version that
// cannot be read is that of a development build.
func checkSupported(version string) error {
	if v := majorMinor(version); v != nil && v[0] < 2 {
		return volume.Errorf(volume.NoSandbox, "containerd %s is not supported: upgrade to 2.0 or newer", clip(strings.TrimPrefix(version, "v")))
	}
	return nil
}

// majorMinor returns the first two numbers of a version, or nil.
func majorMinor(version string) []int {
	v := make([]int, 2)
	if _, err := fmt.Sscanf(strings.TrimPrefix(version, "v"), "%d.%d", &v[0], &v[1]); err != nil {
		return nil
	}
	return v
}

func (c *client) in(ctx context.Context) context.Context {
	return metadata.AppendToOutgoingContext(ctx, namespaceHeader, c.t.cfg.Namespace)
}

// get returns a container, or nil if there is none with this id.
func (c *client) get(ctx context.Context, id string) (*containersapi.Container, error) {
	reply, err := c.containers.Get(c.in(ctx), &containersapi.GetContainerRequest{ID: id})
	if status.Code(err) == codes.NotFound {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("containerd: get container %s: %w", id, err)
	}
	return reply.GetContainer(), nil
}

// each calls f with every container that the filter selects, one at a time: the specs of
// all of them together could exceed the largest message.
func (c *client) each(ctx context.Context, filter string, f func(*containersapi.Container)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.containers.ListStream(c.in(ctx), &containersapi.ListContainersRequest{Filters: []string{filter}})
	if err != nil {
		return fmt.Errorf("containerd: list containers: %w", err)
	}
	for {
		message, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("containerd: list containers: %w", err)
		}
		f(message.GetContainer())
	}
}

// runs reports whether a container's task runs. A shim that hangs or cannot be reached is
// not a sandbox that ended: containerd gives such a task an unknown state, does not
// answer in time, or says Unavailable.
func (c *client) runs(ctx context.Context, id string) (bool, error) {
	asking, cancel := context.WithTimeout(ctx, stateTime)
	defer cancel()
	reply, err := c.tasks.Get(c.in(asking), &tasksapi.GetRequest{ContainerID: id})
	switch status.Code(err) {
	case codes.OK:
		return reply.GetProcess().GetStatus() != tasktypes.Status_STOPPED, nil
	case codes.NotFound:
		return false, nil
	case codes.DeadlineExceeded:
		if ctx.Err() == nil {
			return true, nil
		}
	case codes.Unavailable: // it is the shim's where containerd itself answers
		if container, getErr := c.get(ctx, id); getErr == nil {
			return container != nil, nil
		}
	}
	return false, fmt.Errorf("containerd: get task %s: %w", id, err)
}

// list lists the live sandboxes. It queries their tasks one by one and not by the list of
// all tasks, for which containerd waits for every shim in turn: one sandbox that hangs
// would delay all of it.
func (c *client) list(ctx context.Context) (map[string]sandbox, error) {
	ctx, cancel := context.WithTimeout(ctx, listTime)
	defer cancel()
	var all []sandbox
	err := c.each(ctx, fmt.Sprintf("labels.%q==%s", kindLabel, kindSandbox), func(container *containersapi.Container) {
		if s, ok := c.t.sandboxOf(container); ok {
			all = append(all, s)
		}
	})
	if err != nil {
		return nil, err
	}
	var mu sync.Mutex
	live := make(map[string]sandbox, len(all))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(stateAtOnce)
	for _, s := range all {
		group.Go(func() error {
			runs, err := c.runs(ctx, s.id)
			if runs {
				mu.Lock()
				defer mu.Unlock()
				live[s.id] = s
			}
			return err
		})
	}
	return live, group.Wait()
}

// listed also lists the sandboxes of other controllers, which are not followed.
func (c *client) listed(ctx context.Context) (map[string]bool, error) {
	live, err := c.list(ctx)
	if err != nil {
		return nil, err
	}
	ids := make(map[string]bool, len(live))
	for id := range live {
		ids[id] = true
	}
	others, err := c.others(ctx)
	for _, s := range others {
		ids[s.GetSandboxID()] = true
	}
	return ids, err
}

// podSandboxer is the controller whose sandboxes are containers. The name is empty in records
// of before an upgrade to containerd 2.
const podSandboxer = "podsandbox"

// others lists the sandboxes of other controllers.
func (c *client) others(ctx context.Context) ([]*types.Sandbox, error) {
	reply, err := c.sandboxes.List(c.in(ctx), &sandboxapi.StoreListRequest{})
	if err != nil {
		return nil, fmt.Errorf("containerd: list sandboxes: %w", err)
	}
	return slices.DeleteFunc(reply.GetList(), func(s *types.Sandbox) bool {
		return s.GetSandboxer() == "" || s.GetSandboxer() == podSandboxer
	}), nil
}

// askError gives the error of a query its kind. Whether the caller has ended the query is
// read from ctx: a connection that was closed during the call has the same gRPC code.
// sandboxID is "" for a query about all sandboxes. Nil stays nil, and an error that has a
// kind stays as it is.
func askError(ctx context.Context, party, sandboxID string, err error) error {
	if _, hasKind := errors.AsType[*volume.Error](err); err == nil || hasKind {
		return err
	}
	about := "sandbox " + sandboxID
	if sandboxID == "" {
		about = "the node's containers"
	}
	switch {
	case errors.Is(ctx.Err(), context.Canceled):
		return volume.Errorf(volume.Canceled, "%s: %s was asked, and the caller went away: %w", about, party, err)
	case ctx.Err() != nil, status.Code(err) == codes.DeadlineExceeded:
		return volume.Errorf(volume.Timeout, "%s: %s did not answer in time: %w", about, party, err)
	default:
		return volume.Errorf(volume.NoSandbox, "%s: %s cannot be asked: %w", about, party, err)
	}
}

// clip shortens untrusted text for the log.
func clip(s string) string { return sys.ClipTo(s, 128) }

// sandboxAnnotation names a container's sandbox in its spec. Containers that ctr made, or the
// CRI before an upgrade to containerd 2, do not have the field for it.
const sandboxAnnotation = "io.kubernetes.cri.sandbox-id"

const maxSpec = 8 << 20

type spec struct {
	Annotations map[string]string `json:"annotations"`
	Mounts      []mount           `json:"mounts"`
}

type mount struct {
	Source      string `json:"source"`
	Destination string `json:"destination"`
}

func (c *client) containerIDs(ctx context.Context, sandboxID, podUID string) (ids []string, err error) {
	err = c.inSandbox(ctx, sandboxID, podUID, func(container *containersapi.Container, _ spec) { ids = append(ids, container.GetID()) })
	return ids, err
}

func (c *client) destinations(ctx context.Context, sandboxID, podUID, path string) (found []string, err error) {
	err = c.inSandbox(ctx, sandboxID, podUID, func(_ *containersapi.Container, s spec) {
		for _, mount := range s.Mounts {
			if isSource(podUID, mount.Source, path) && !slices.Contains(found, mount.Destination) {
				found = append(found, mount.Destination)
			}
		}
	})
	return found, err
}

func (c *client) inSandbox(ctx context.Context, sandboxID, podUID string, f func(*containersapi.Container, spec)) error {
	return c.each(ctx, fmt.Sprintf("labels.%q==%s", podLabel, podUID), func(container *containersapi.Container) {
		if container.GetLabels()[kindLabel] == kindSandbox || !abi.IsSandboxID(container.GetID()) {
			return
		}
		if s, ok := c.readSpec(container); ok && sandboxIDOf(container, s) == sandboxID {
			f(container, s)
		}
	})
}

// readSpec reads a container's spec, and reports whether that is possible. It logs only the
// size of a bad one: a spec holds the environment, which holds secrets.
func (c *client) readSpec(container *containersapi.Container) (spec, bool) {
	var s spec
	raw := container.GetSpec().GetValue()
	if len(raw) > maxSpec || json.Unmarshal(raw, &s) != nil {
		c.t.log.Warn("a container's spec cannot be read", zap.String("id", container.GetID()), zap.Int("bytes", len(raw)))
		return spec{}, false
	}
	return s, true
}

func (c *client) mounting(ctx context.Context, paths []string) ([]string, error) {
	users := make(map[string][]string) // the containers that mount a path, by sandbox
	filter := fmt.Sprintf("labels.%q!=%s", kindLabel, kindSandbox)
	err := c.each(ctx, filter, func(container *containersapi.Container) {
		// One that cannot be read is no reason to refuse a volume: who has the device is the kernel's word.
		if s, ok := c.readSpec(container); ok && slices.ContainsFunc(s.Mounts, func(m mount) bool { return isOneOf(paths, m.Source) }) {
			id := sandboxIDOf(container, s)
			users[id] = append(users[id], container.GetID())
		}
	})
	if err != nil {
		return nil, err
	}
	return c.liveOf(ctx, users)
}

// liveOf selects the sandboxes that live.
func (c *client) liveOf(ctx context.Context, users map[string][]string) (live []string, err error) {
	for id, containers := range users {
		lives, err := c.lives(ctx, id, containers)
		if err != nil {
			return nil, askError(ctx, c.t.party, id, err)
		}
		if lives {
			live = append(live, id)
		}
	}
	return live, nil
}

// lives reports whether a sandbox is known, or its own task or that of one of its containers
// runs. It can be one that kubelet did not make, or one without a container of its own.
func (c *client) lives(ctx context.Context, id string, containers []string) (bool, error) {
	if _, known := c.t.PodOf(id); known {
		return true, nil
	}
	for _, task := range append([]string{id}, containers...) {
		if runs, err := c.runs(ctx, task); runs || err != nil {
			return runs, err
		}
	}
	return false, nil
}

// sandboxIDOf returns the id of a container's sandbox. Outside of Kubernetes that is the
// container's own.
func sandboxIDOf(c *containersapi.Container, s spec) string {
	if id := c.GetSandbox(); id != "" {
		return id
	}
	if id := s.Annotations[sandboxAnnotation]; id != "" {
		return id
	}
	return c.GetID()
}

func isOneOf(sources []string, source string) bool {
	return slices.ContainsFunc(sources, func(one string) bool { return path.Clean(one) == path.Clean(source) })
}

// isSource reports whether a mount's host path is source, which is a resolved path.
// Kubelet's directory may be a symbolic link, and runtimes report the path as kubelet named
// it: containerd resolves only its last element. A path that cannot be kubelet's name for
// source is not resolved: it may be on a server that hangs.
func isSource(pod, hostPath, source string) bool {
	if hostPath == source {
		return true
	}
	ofPod := strings.LastIndex(hostPath, "/pods/"+pod+"/")
	if ofPod < 0 || !strings.HasSuffix(source, hostPath[ofPod:]) {
		return false
	}
	resolved, err := filepath.EvalSymlinks(hostPath)
	return err == nil && resolved == source
}

// sandboxOf reports whether a container is a sandbox that the CRI made, and reads it.
func (t *Tracker) sandboxOf(c *containersapi.Container) (sandbox, bool) {
	if c.GetLabels()[kindLabel] != kindSandbox {
		return sandbox{}, false
	}
	s := sandbox{id: c.GetID(), pod: c.GetLabels()[podLabel], created: c.GetCreatedAt().AsTime()}
	return s, t.good(s)
}
