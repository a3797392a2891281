package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
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
	// pollTime is how often the runtime is asked while there are volumes, and idleTime how often while
	// there are none. kubelet does so every second.
	pollTime, idleTime = 2 * time.Second, 30 * time.Second
	// settleTime is when the first listing is repeated.
	settleTime = time.Second
	// askTime bounds a query of all containers, and statusTime one of a container there.
	askTime, statusTime = 30 * time.Second, 2 * time.Second
	// endTime bounds one query whether a sandbox has ended: a shim that hangs delays all listings
	// by so much. endsAtOnce is how many are asked at once.
	endTime, endsAtOnce = 500 * time.Millisecond, 16
)

type client struct {
	t          *Tracker
	api        runtimeapi.RuntimeServiceClient
	containerd bool

	mu sync.Mutex
	// ended are the listed sandboxes that have ended, and whether that is proven. None comes back to life.
	ended map[string]bool
	// hung are the listed sandboxes about which nothing was said within endTime, and when that was.
	hung map[string]time.Time
}

// check returns an error if the runtime does not serve the CRI, or is too old.
func (c *client) check(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, listTime)
	defer cancel()
	reply, err := c.api.Version(ctx, &runtimeapi.VersionRequest{})
	if status.Code(err) == codes.Unimplemented {
		return volume.Errorf(volume.NoSandbox, "%s does not serve the CRI: if that is containerd, remove \"cri\" from disabled_plugins "+
			"in its config.toml, or see why the plugin failed (ctr plugins ls)", c.t.party)
	}
	if err != nil {
		return fmt.Errorf("ask for the version: %w", err)
	}
	if c.containerd = reply.GetRuntimeName() == "containerd"; c.containerd {
		return checkSupported(reply.GetRuntimeVersion())
	}
	return nil
}

// checkSupported returns an error if a version of containerd is too old. A version that
// cannot be read is that of a development build.
func checkSupported(version string) error {
	var major, minor int
	if _, err := fmt.Sscanf(strings.TrimPrefix(version, "v"), "%d.%d", &major, &minor); err == nil && major < 2 {
		return volume.Errorf(volume.NoSandbox, "containerd %s is not supported: upgrade to 2.0 or newer", clip(strings.TrimPrefix(version, "v")))
	}
	return nil
}

// live lists the sandboxes that kubelet made and that may live. It logs the others once, not at each listing.
func (c *client) live(ctx context.Context) (live map[string]sandbox, err error) {
	all, err := c.sandboxes(ctx, false)
	if err != nil {
		return nil, err
	}
	live, odd := make(map[string]sandbox, len(all)), make(map[string]bool)
	for _, item := range all {
		s := sandbox{id: item.GetId(), pod: item.GetMetadata().GetUid(), created: time.Unix(0, item.GetCreatedAt())}
		if abi.IsSandboxID(s.id) && sys.IsPodUID(s.pod) {
			live[s.id] = s
			continue
		}
		odd[s.id] = true
		if !c.t.odd[s.id] {
			c.t.log.Warn("a sandbox with an odd id or pod UID is ignored", zap.String("id", clip(s.id)), zap.String("pod", clip(s.pod)))
		}
	}
	c.t.odd = odd
	return live, nil
}

// sandboxes lists those that may live, also those that kubelet did not make: with doubtful also those whose end
// is not proven. Only asks about the end of these alone, which no other shim delays.
func (c *client) sandboxes(ctx context.Context, doubtful bool, only ...string) ([]*runtimeapi.PodSandbox, error) {
	ctx, cancel := context.WithTimeout(ctx, listTime)
	defer cancel()
	reply, err := c.api.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
	if err != nil {
		return nil, fmt.Errorf("list sandboxes: %w", err)
	}
	ended := c.endedOf(ctx, reply.GetItems(), only)
	return slices.DeleteFunc(reply.GetItems(), func(p *runtimeapi.PodSandbox) bool {
		proven, ended := ended[p.GetId()]
		return ended && (proven || !doubtful)
	}), nil
}

// endedOf returns the sandboxes that have ended, and whether that is proven. Those whose shims hang are asked last, and
// first the one that was asked longest ago: they may use up the time, and another one may have ended just now.
func (c *client) endedOf(ctx context.Context, all []*runtimeapi.PodSandbox, only []string) map[string]bool {
	c.mu.Lock()
	before, hung := c.ended, c.hung
	c.mu.Unlock()
	all = slices.DeleteFunc(slices.Clone(all), func(p *runtimeapi.PodSandbox) bool {
		return p.GetState() == runtimeapi.PodSandboxState_SANDBOX_READY || len(only) > 0 && !slices.Contains(only, p.GetId())
	})
	slices.SortStableFunc(all, func(a, b *runtimeapi.PodSandbox) int { return hung[a.GetId()].Compare(hung[b.GetId()]) })
	var mu sync.Mutex
	ended, hangs := make(map[string]bool), make(map[string]time.Time)
	sys.Each(endsAtOnce, slices.All(all), func(_ int, p *runtimeapi.PodSandbox) {
		proven, over := before[p.GetId()]
		silent, begun := false, time.Now()
		if !over {
			over, proven, silent = c.hasEnded(ctx, p.GetId())
		}
		mu.Lock()
		defer mu.Unlock()
		switch last, hung := hung[p.GetId()]; {
		case over:
			ended[p.GetId()] = proven
		case silent && time.Since(begun) >= endTime:
			hangs[p.GetId()] = begun
		case silent && hung: // it was given no time
			hangs[p.GetId()] = last
		}
	})
	if len(only) == 0 {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.ended, c.hung = ended, hangs
	}
	return ended
}

// hasEnded reports whether a sandbox that is not ready is known to have ended. Containerd also reports
// one as not ready whose start failed and could not be undone, or whose shim did not answer when
// containerd started. So containerd is asked for the sandbox's process, too, and one that is not known
// to have ended lives. Nothing is proven by an answer without a process, of a sandbox that is no container.
func (c *client) hasEnded(ctx context.Context, id string) (ended, proven, silent bool) {
	if !c.containerd {
		return true, true, false
	}
	ctx, cancel := context.WithTimeout(ctx, endTime)
	defer cancel()
	reply, err := c.api.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id, Verbose: true})
	if err != nil {
		code := status.Code(err)
		return code == codes.NotFound, code == codes.NotFound, code == codes.DeadlineExceeded || code == codes.Canceled
	}
	var info struct {
		ProcessStatus *string `json:"processStatus"`
	}
	if json.Unmarshal([]byte(reply.GetInfo()["info"]), &info) != nil || info.ProcessStatus == nil ||
		reply.GetStatus().GetState() == runtimeapi.PodSandboxState_SANDBOX_READY {
		return false, false, false
	}
	proven = *info.ProcessStatus == "stopped" || *info.ProcessStatus == "deleted"
	return proven || *info.ProcessStatus == "", proven, false
}

func (c *client) listed(ctx context.Context, only ...string) (map[string]bool, error) {
	all, err := c.sandboxes(ctx, true, only...)
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
// there seconds later. A container that runs has its mounts although its sandbox has ended: those come last.
func (c *client) mounting(ctx context.Context, paths []string) (users []string, unread map[string]error, err error) {
	all, err := c.list(ctx, nil)
	if err != nil {
		return nil, nil, err
	}
	live, err := c.listed(ctx)
	if err != nil {
		return nil, nil, err
	}
	unread, paths = make(map[string]error), sys.Map(paths, path.Clean)
	for _, alive := range []bool{true, false} {
		for _, container := range all {
			id := container.GetPodSandboxId()
			if live[id] != alive || !alive && !mayRun(container) || slices.Contains(users, id) {
				continue
			}
			asking, cancel := context.WithTimeout(ctx, statusTime)
			mounts, err := c.mounts(asking, container.GetId())
			cancel()
			if err != nil {
				unread[id] = askError(ctx, c.t.party, id, err)
			}
			if slices.ContainsFunc(mounts, func(m *runtimeapi.Mount) bool { return slices.Contains(paths, path.Clean(m.GetHostPath())) }) {
				users = append(users, id)
			}
		}
	}
	return users, unread, nil
}

func mayRun(c *runtimeapi.Container) bool {
	return c.GetState() == runtimeapi.ContainerState_CONTAINER_RUNNING || c.GetState() == runtimeapi.ContainerState_CONTAINER_UNKNOWN
}

// isSource reports whether a mount's host path is source, which is a resolved path. Kubelet's directory may be a
// symbolic link, and runtimes report the path as kubelet named it: containerd resolves only its last element. A path
// that cannot be kubelet's name for source is not resolved: it may be on a server that hangs.
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

// askError gives the error of a query its kind. Whether the caller has ended the query is read from ctx: a connection
// that was closed during the call has the same gRPC code. sandboxID is "" for a query about all sandboxes. Nil stays
// nil, and an error that has a kind stays as it is.
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

// follow lists the sandboxes regularly over one connection, until that breaks. It does not listen to events: containerd
// waits for each listener, so that one that does not read, because its process is stopped or hangs on a disk, would
// hang all pods of the node; and CRI-O before 1.28 sends each event to one listener only, which kubelet would miss.
func follow(ctx context.Context, t *Tracker, conn *grpc.ClientConn) error {
	c := &client{t: t, api: runtimeapi.NewRuntimeServiceClient(conn)}
	if err := c.check(ctx); err != nil {
		return err
	}
	for pause := settleTime; ; pause = pollTime {
		live, err := c.live(ctx)
		if err != nil {
			return err
		}
		t.replace(c, live)
		if !c.wait(ctx, pause) {
			return ctx.Err()
		}
	}
}

// wait returns when it is time to list again. While there are no volumes, that is seldom.
func (c *client) wait(ctx context.Context, pause time.Duration) bool {
	first, busy := pause == settleTime, c.t.cfg.Busy
	for end := time.Now().Add(idleTime); sys.Sleep(ctx, pause); pause = pollTime {
		if first || busy == nil || busy() || time.Now().After(end) {
			return true
		}
	}
	return false
}
