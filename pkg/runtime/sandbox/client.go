package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	eventsapi "github.com/containerd/containerd/api/services/events/v1"
	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// The labels of containerd's CRI plugin, the same since 1.0.
const (
	kindLabel   = "io.cri-containerd.kind"
	kindSandbox = "sandbox"
	podLabel    = "io.kubernetes.pod.uid"
	// namespaceHeader is how a call says which namespace it is about.
	namespaceHeader = "containerd-namespace"
)

// maxMessage bounds an answer of containerd. A single container with its whole
// spec is far smaller.
const maxMessage = 16 << 20

// client is one connection to containerd.
type client struct {
	conn       *grpc.ClientConn
	namespace  string
	containers containersapi.ContainersClient
	tasks      tasksapi.TasksClient
	events     eventsapi.EventsClient
}

func dial(socket, namespace string) (*client, error) {
	conn, err := grpc.NewClient("unix:"+socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)))
	if err != nil {
		return nil, err
	}
	return &client{
		conn: conn, namespace: namespace, containers: containersapi.NewContainersClient(conn),
		tasks: tasksapi.NewTasksClient(conn), events: eventsapi.NewEventsClient(conn),
	}, nil
}

func (c *client) in(ctx context.Context) context.Context {
	return metadata.AppendToOutgoingContext(ctx, namespaceHeader, c.namespace)
}

// get fetches a container; a container that is not there is nil.
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

// each calls f with every container that the filter selects, one at a time: the
// specs of all of them at once could be more than a message may hold.
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

// running lists the containers whose task runs.
func (c *client) running(ctx context.Context) (map[string]bool, error) {
	reply, err := c.tasks.List(c.in(ctx), &tasksapi.ListTasksRequest{})
	if err != nil {
		return nil, fmt.Errorf("containerd: list tasks: %w", err)
	}
	out := make(map[string]bool, len(reply.GetTasks()))
	for _, task := range reply.GetTasks() {
		switch task.GetStatus() {
		case tasktypes.Status_RUNNING, tasktypes.Status_CREATED, tasktypes.Status_PAUSED, tasktypes.Status_PAUSING:
			out[task.GetID()] = true
		}
	}
	return out, nil
}

// sandboxOf reads a sandbox from its container. Whatever does not look like one
// of CRI's is none.
func sandboxOf(c *containersapi.Container) (sandbox, bool) {
	pod := c.GetLabels()[podLabel]
	if c.GetLabels()[kindLabel] != kindSandbox || !idForm.MatchString(c.GetID()) || !podForm.MatchString(pod) {
		return sandbox{}, false
	}
	return sandbox{
		id: c.GetID(), pod: pod, runtime: c.GetRuntime().GetName(), created: c.GetCreatedAt().AsTime(),
	}, true
}

// askError classes the failure of a question that somebody waits for.
func askError(err error) error {
	switch status.Code(err) {
	case codes.DeadlineExceeded:
		return deferral.Errorf(deferral.Timeout, "containerd did not answer in time: %w", err)
	case codes.Canceled:
		return deferral.Errorf(deferral.Canceled, "containerd was asked for a caller who went away: %w", err)
	default:
		return deferral.Errorf(deferral.NoSandbox, "containerd cannot be asked: %w", err)
	}
}
