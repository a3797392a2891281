package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

const (
	// criListTime bounds one listing, which runtimes make from memory.
	criListTime = 10 * time.Second
	// pollTime is how often a runtime that sends no events is asked while there are
	// volumes, as kubelet does every second, and idleTime how often while there are none.
	pollTime, idleTime = 2 * time.Second, 30 * time.Second
	// listGap is the least time between two listings: a few of them cover hundreds of
	// events in a row.
	listGap = 20 * time.Millisecond
	// eventsAgain is how often a runtime that offers no events is asked for them once more.
	eventsAgain = 30 * time.Second
)

type criClient struct {
	t   *Tracker
	api runtimeapi.RuntimeServiceClient
}

// broadcasts reports whether the runtime sends each event to all listeners. CRI-O before 1.28
// sends it to one of them: to listen would take events away from kubelet.
func (c *criClient) broadcasts(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, criListTime)
	defer cancel()
	reply, err := c.api.Version(ctx, &runtimeapi.VersionRequest{})
	if err != nil {
		return false, fmt.Errorf("ask for the version: %w", err)
	}
	switch version := reply.GetRuntimeVersion(); reply.GetRuntimeName() {
	case "containerd":
		return true, checkSupported(version)
	case "cri-o":
		return slices.Compare(majorMinor(version), []int{1, 28}) >= 0, nil
	}
	return false, nil
}

func (c *criClient) live(ctx context.Context) (map[string]sandbox, error) {
	ready, err := c.ready(ctx)
	if err != nil {
		return nil, err
	}
	live := make(map[string]sandbox, len(ready))
	for _, item := range ready {
		s := sandbox{id: item.GetId(), pod: item.GetMetadata().GetUid(), created: time.Unix(0, item.GetCreatedAt())}
		if c.t.good(s) {
			live[s.id] = s
		}
	}
	return live, nil
}

// ready lists the sandboxes that are ready, also those that kubelet did not make.
func (c *criClient) ready(ctx context.Context) ([]*runtimeapi.PodSandbox, error) {
	ctx, cancel := context.WithTimeout(ctx, criListTime)
	defer cancel()
	reply, err := c.api.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{Filter: &runtimeapi.PodSandboxFilter{
		State: &runtimeapi.PodSandboxStateValue{State: runtimeapi.PodSandboxState_SANDBOX_READY},
	}})
	if err != nil {
		return nil, fmt.Errorf("list sandboxes: %w", err)
	}
	// A runtime that ignores the filter lists ended ones as well.
	return slices.DeleteFunc(reply.GetItems(), func(p *runtimeapi.PodSandbox) bool {
		return p.GetState() != runtimeapi.PodSandboxState_SANDBOX_READY
	}), nil
}

func (c *criClient) listed(ctx context.Context) (map[string]bool, error) {
	ready, err := c.ready(ctx)
	ids := make(map[string]bool, len(ready))
	for _, item := range ready {
		ids[item.GetId()] = true
	}
	return ids, err
}

func (c *criClient) containerIDs(ctx context.Context, sandboxID, _ string) ([]string, error) {
	all, err := c.list(ctx, &runtimeapi.ContainerFilter{PodSandboxId: sandboxID})
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, container := range all {
		if container.GetPodSandboxId() == sandboxID && abi.IsSandboxID(container.GetId()) {
			ids = append(ids, container.GetId())
		}
	}
	return ids, nil
}

// list lists containers; a nil filter selects all.
func (c *criClient) list(ctx context.Context, filter *runtimeapi.ContainerFilter) ([]*runtimeapi.Container, error) {
	reply, err := c.api.ListContainers(ctx, &runtimeapi.ListContainersRequest{Filter: filter})
	if err != nil {
		return nil, fmt.Errorf("list containers: %w", err)
	}
	return reply.GetContainers(), nil
}

// mounts lists a container's mounts. A container that is gone has none.
func (c *criClient) mounts(ctx context.Context, id string) ([]*runtimeapi.Mount, error) {
	reply, err := c.api.ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: id})
	if status.Code(err) == codes.NotFound {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("ask for container %s: %w", id, err)
	}
	return reply.GetStatus().GetMounts(), nil
}

func (c *criClient) destinations(ctx context.Context, sandboxID, podUID, path string) ([]string, error) {
	ids, err := c.containerIDs(ctx, sandboxID, podUID)
	if err != nil {
		return nil, err
	}
	var found []string
	for _, id := range ids {
		mounts, err := c.mounts(ctx, id)
		if err != nil {
			return nil, err
		}
		for _, mount := range mounts {
			if isSource(podUID, mount.GetHostPath(), path) && !slices.Contains(found, mount.GetContainerPath()) {
				found = append(found, mount.GetContainerPath())
			}
		}
	}
	return found, nil
}

// mounting asks which sandboxes are ready and does not use those in memory: without events,
// a new one gets there seconds later.
func (c *criClient) mounting(ctx context.Context, paths []string) ([]string, error) {
	all, err := c.list(ctx, nil)
	if err != nil {
		return nil, err
	}
	live, err := c.listed(ctx)
	if err != nil {
		return nil, err
	}
	var users []string
	for _, container := range all {
		id := container.GetPodSandboxId()
		if !live[id] || slices.Contains(users, id) {
			continue
		}
		mounts, err := c.mounts(ctx, container.GetId())
		if err != nil {
			return nil, askError(ctx, c.t.party, id, err)
		}
		if slices.ContainsFunc(mounts, func(m *runtimeapi.Mount) bool { return isOneOf(paths, m.GetHostPath()) }) {
			users = append(users, id)
		}
	}
	return users, nil
}

// criFollower uses one connection until that breaks. A sandbox is live while the runtime
// lists it as ready, which includes sandboxes without a container.
//
// An event only triggers a new listing. Its content is not used, because runtimes read and
// send a sandbox's state in two steps: "ready" can arrive after "not ready".
type criFollower struct {
	t      *Tracker
	c      *criClient
	hints  chan struct{}
	ended  chan error
	pushed bool      // the runtime sends events
	asked  time.Time // when events were requested last
	// unsettled is set when events were requested, until the next listing.
	unsettled bool
	beside    *sync.WaitGroup
}

func followCRI(ctx context.Context, t *Tracker, conn *grpc.ClientConn, beside *sync.WaitGroup) error {
	c := &criClient{t: t, api: runtimeapi.NewRuntimeServiceClient(conn)}
	f := &criFollower{t: t, c: c, hints: make(chan struct{}, 1), ended: make(chan error, 1), beside: beside}
	if err := f.subscribe(ctx); err != nil {
		return err
	}
	return f.loop(ctx)
}

// subscribe starts to listen to the runtime's events, where it broadcasts them.
func (f *criFollower) subscribe(ctx context.Context) error {
	f.asked, f.unsettled = time.Now(), true
	broadcasts, err := f.c.broadcasts(ctx)
	if err != nil {
		return err
	}
	if f.pushed = broadcasts; broadcasts {
		f.beside.Go(func() { f.ended <- f.listen(ctx) })
	}
	return nil
}

func (f *criFollower) loop(ctx context.Context) error {
	for {
		live, err := f.c.live(ctx)
		if err != nil {
			return err
		}
		f.t.replace(f.c, live, nil)
		f.t.polled.Store(!f.pushed || f.unsettled && f.t.polled.Load()) // events that were just requested may be refused
		most := relistTime
		if f.unsettled {
			f.unsettled, most = false, settleTime
		}
		if err := f.wait(ctx, most); err != nil {
			return err
		}
	}
}

func (f *criFollower) wait(ctx context.Context, most time.Duration) error {
	sys.Sleep(ctx, listGap)
	start, busy := time.Now(), f.t.cfg.Busy
	tick := time.NewTicker(pollTime)
	defer tick.Stop()
	end := time.NewTimer(most)
	defer end.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-f.hints:
			return nil
		case <-end.C:
			return nil
		case err := <-f.ended:
			return f.unpushed(err)
		case <-tick.C:
			if !f.pushed && time.Since(f.asked) >= eventsAgain {
				return f.subscribe(ctx)
			}
			if !f.pushed && (busy == nil || busy() || time.Since(start) >= idleTime) {
				return nil
			}
		}
	}
}

// unpushed switches to polling if the runtime offers no events. Any other end of the stream
// is a broken connection, and an error.
func (f *criFollower) unpushed(err error) error {
	if !errors.Is(err, io.EOF) && status.Code(err) != codes.Unimplemented {
		return fmt.Errorf("events: %w", err)
	}
	f.pushed = false
	if !f.t.polled.Swap(true) {
		f.t.log.Info("the container runtime sends no events; it is polled every few seconds instead", zap.String("runtime", f.t.party))
	}
	return nil
}

// listen reads the event stream until it ends, and triggers listings.
func (f *criFollower) listen(ctx context.Context) error {
	stream, err := f.c.api.GetContainerEvents(ctx, &runtimeapi.GetEventsRequest{})
	if err != nil {
		return err
	}
	for {
		event, err := stream.Recv()
		if err != nil {
			return err
		}
		if !f.isNews(event) {
			continue
		}
		select {
		case f.hints <- struct{}{}:
		default: // one is pending already
		}
	}
}

// isNews reports whether an event can mean that a sandbox came or went. A sandbox's own
// event always can, whatever is known: a listing under way may be older. Most events are of
// containers in known sandboxes.
func (f *criFollower) isNews(event *runtimeapi.ContainerEventResponse) bool {
	sandbox := event.GetPodSandboxStatus()
	if sandbox == nil || event.GetContainerId() == sandbox.GetId() {
		return true
	}
	_, known := f.t.PodOf(sandbox.GetId())
	return known != (sandbox.GetState() == runtimeapi.PodSandboxState_SANDBOX_READY)
}
