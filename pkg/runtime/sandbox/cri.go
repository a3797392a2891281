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
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

const (
	// listTime bounds one listing, which runtimes make from memory.
	listTime = 10 * time.Second
	// pollTime is how often a runtime that sends no events is asked while there are
	// volumes, as kubelet does every second, and idleTime how often while there are none.
	pollTime, idleTime = 2 * time.Second, 30 * time.Second
	// listGap is the least time between two listings: a few of them cover hundreds of
	// events in a row.
	listGap = 20 * time.Millisecond
	// eventsAgain is how often a runtime that offers no events is asked for them once more.
	eventsAgain = 30 * time.Second
	// settleTime is when the first listing is repeated: an event between our request for
	// events and the runtime's handling of it would be in neither.
	settleTime = time.Second
	// relistTime is how often everything is listed again, in case that events were lost.
	relistTime = 5 * time.Minute
	// askTime bounds a query of all containers.
	askTime = 30 * time.Second
	// endTime bounds one query whether a sandbox has ended: a shim that hangs delays all listings
	// by so much. endsAtOnce is how many are asked at once.
	endTime, endsAtOnce = 500 * time.Millisecond, 16
)

type client struct {
	t          *Tracker
	api        runtimeapi.RuntimeServiceClient
	containerd atomic.Bool

	mu sync.Mutex
	// ended are the listed sandboxes that are known to have ended. None of them comes back to life.
	ended map[string]bool
}

// broadcasts reports whether the runtime sends each event to all listeners. CRI-O before 1.28
// sends it to one of them: to listen would take events away from kubelet.
func (c *client) broadcasts(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, listTime)
	defer cancel()
	reply, err := c.api.Version(ctx, &runtimeapi.VersionRequest{})
	if status.Code(err) == codes.Unimplemented {
		return false, volume.Errorf(volume.NoSandbox, "%s does not serve the CRI: if that is containerd, remove \"cri\" from disabled_plugins in its config.toml", c.t.party)
	}
	if err != nil {
		return false, fmt.Errorf("ask for the version: %w", err)
	}
	version := reply.GetRuntimeVersion()
	c.containerd.Store(reply.GetRuntimeName() == "containerd")
	switch reply.GetRuntimeName() {
	case "containerd":
		return true, checkSupported(version)
	case "cri-o":
		return slices.Compare(majorMinor(version), []int{1, 28}) >= 0, nil
	}
	return false, nil
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

// live lists the sandboxes that kubelet made and that may live. unproven reports whether one of them
// is not ready, and not known to have ended.
func (c *client) live(ctx context.Context) (live map[string]sandbox, unproven bool, err error) {
	all, err := c.sandboxes(ctx)
	if err != nil {
		return nil, false, err
	}
	live = make(map[string]sandbox, len(all))
	for _, item := range all {
		s := sandbox{id: item.GetId(), pod: item.GetMetadata().GetUid(), created: time.Unix(0, item.GetCreatedAt())}
		if c.t.good(s) {
			live[s.id] = s
			unproven = unproven || !isReady(item)
		}
	}
	return live, unproven, nil
}

// sandboxes lists those that may live, also those that kubelet did not make.
func (c *client) sandboxes(ctx context.Context) ([]*runtimeapi.PodSandbox, error) {
	ctx, cancel := context.WithTimeout(ctx, listTime)
	defer cancel()
	reply, err := c.api.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
	if err != nil {
		return nil, fmt.Errorf("list sandboxes: %w", err)
	}
	ended := c.endedOf(ctx, reply.GetItems())
	return slices.DeleteFunc(reply.GetItems(), func(p *runtimeapi.PodSandbox) bool { return ended[p.GetId()] }), nil
}

func isReady(p *runtimeapi.PodSandbox) bool {
	return p.GetState() == runtimeapi.PodSandboxState_SANDBOX_READY
}

// endedOf returns the sandboxes that are known to have ended.
func (c *client) endedOf(ctx context.Context, all []*runtimeapi.PodSandbox) map[string]bool {
	c.mu.Lock()
	before := c.ended
	c.mu.Unlock()
	var mu sync.Mutex
	ended := make(map[string]bool)
	var group errgroup.Group
	group.SetLimit(endsAtOnce)
	for _, p := range all {
		if isReady(p) {
			continue
		}
		group.Go(func() error {
			if before[p.GetId()] || c.hasEnded(ctx, p.GetId()) {
				mu.Lock()
				defer mu.Unlock()
				ended[p.GetId()] = true
			}
			return nil
		})
	}
	_ = group.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = ended
	return ended
}

// hasEnded reports whether a sandbox that is not ready is known to have ended. Containerd also reports
// one as not ready whose start failed and could not be undone, or whose shim did not answer when
// containerd started. So containerd is asked for the sandbox's process, too, and one that is not known
// to have ended lives.
func (c *client) hasEnded(ctx context.Context, id string) bool {
	if !c.containerd.Load() {
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, endTime)
	defer cancel()
	reply, err := c.api.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id, Verbose: true})
	if err != nil {
		return status.Code(err) == codes.NotFound
	}
	var info struct {
		ProcessStatus *string `json:"processStatus"`
	}
	if json.Unmarshal([]byte(reply.GetInfo()["info"]), &info) != nil || info.ProcessStatus == nil {
		return false
	}
	// It is empty for a sandbox that is no container: of one whose shim cannot be asked there is no answer.
	return slices.Contains([]string{"", "stopped", "deleted"}, *info.ProcessStatus)
}

func (c *client) listed(ctx context.Context) (map[string]bool, error) {
	all, err := c.sandboxes(ctx)
	ids := make(map[string]bool, len(all))
	for _, item := range all {
		ids[item.GetId()] = true
	}
	return ids, err
}

func (c *client) containerIDs(ctx context.Context, sandboxID string) ([]string, error) {
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
func (c *client) list(ctx context.Context, filter *runtimeapi.ContainerFilter) ([]*runtimeapi.Container, error) {
	reply, err := c.api.ListContainers(ctx, &runtimeapi.ListContainersRequest{Filter: filter})
	if err != nil {
		return nil, fmt.Errorf("list containers: %w", err)
	}
	return reply.GetContainers(), nil
}

// mounts lists a container's mounts. A container that is gone has none.
func (c *client) mounts(ctx context.Context, id string) ([]*runtimeapi.Mount, error) {
	reply, err := c.api.ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: id})
	if status.Code(err) == codes.NotFound {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("ask for container %s: %w", id, err)
	}
	return reply.GetStatus().GetMounts(), nil
}

func (c *client) destinations(ctx context.Context, sandboxID, podUID, path string) ([]string, error) {
	ids, err := c.containerIDs(ctx, sandboxID)
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

// mounting asks which sandboxes live and does not use those in memory: without events, a new one gets
// there seconds later. A container that runs has its mounts although its sandbox has ended.
func (c *client) mounting(ctx context.Context, paths []string) ([]string, error) {
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
		if !live[id] && !mayRun(container) || slices.Contains(users, id) {
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

func mayRun(c *runtimeapi.Container) bool {
	return c.GetState() == runtimeapi.ContainerState_CONTAINER_RUNNING || c.GetState() == runtimeapi.ContainerState_CONTAINER_UNKNOWN
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

// follower uses one connection until that breaks.
//
// An event only triggers a new listing. Its content is not used, because runtimes read and
// send a sandbox's state in two steps: "ready" can arrive after "not ready".
type follower struct {
	t      *Tracker
	c      *client
	hints  chan struct{}
	ended  chan error
	pushed bool      // the runtime sends events
	asked  time.Time // when events were requested last
	// unsettled is set when events were requested, until the next listing.
	unsettled bool
	beside    *sync.WaitGroup
}

func follow(ctx context.Context, t *Tracker, conn *grpc.ClientConn, beside *sync.WaitGroup) error {
	c := &client{t: t, api: runtimeapi.NewRuntimeServiceClient(conn)}
	f := &follower{t: t, c: c, hints: make(chan struct{}, 1), ended: make(chan error, 1), beside: beside}
	if err := f.subscribe(ctx); err != nil {
		return err
	}
	return f.loop(ctx)
}

// subscribe starts to listen to the runtime's events, where it broadcasts them.
func (f *follower) subscribe(ctx context.Context) error {
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

func (f *follower) loop(ctx context.Context) error {
	for {
		live, unproven, err := f.c.live(ctx)
		if err != nil {
			return err
		}
		f.t.replace(f.c, live)
		f.t.polled.Store(!f.pushed || f.unsettled && f.t.polled.Load()) // events that were just requested may be refused
		most := relistTime
		switch {
		case f.unsettled:
			f.unsettled, most = false, settleTime
		case unproven:
			most = pollTime
		}
		if err := f.wait(ctx, most); err != nil {
			return err
		}
	}
}

func (f *follower) wait(ctx context.Context, most time.Duration) error {
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
func (f *follower) unpushed(err error) error {
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
func (f *follower) listen(ctx context.Context) error {
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
func (f *follower) isNews(event *runtimeapi.ContainerEventResponse) bool {
	sandbox := event.GetPodSandboxStatus()
	if sandbox == nil || event.GetContainerId() == sandbox.GetId() {
		return true
	}
	_, known := f.t.PodOf(sandbox.GetId())
	return known != (sandbox.GetState() == runtimeapi.PodSandboxState_SANDBOX_READY)
}
