// Package sandbox follows the container runtime: which sandboxes a pod has, and when one
// comes or goes. It asks by the CRI, the API that kubelet uses and every runtime has.
//
// It is for this project's daemon and may change with any release.
package sandbox

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

type sandbox struct {
	id      string
	pod     string
	created time.Time
}

// Config says where the container runtime is and what to call on changes.
type Config struct {
	// Runtime names the container runtime in messages.
	Runtime string
	Socket  string
	// OnAdded and OnGone are called for sandboxes that came and went, one at a time. They
	// must not block; they may be nil.
	OnAdded func(podUID, id string)
	OnGone  func(id string)
	// Busy reports whether there are volumes. While there are none, the runtime is asked
	// rarely. It must not block; nil counts as true.
	Busy func() bool
}

// Tracker knows the live sandboxes of a container runtime. It answers from memory, except for calls with a context.
type Tracker struct {
	cfg   Config
	party string // the container runtime, and where it is
	log   *zap.Logger
	dial  func(ctx context.Context, socket string) (net.Conn, error)
	odd   map[string]bool // ids in the last listing that are ignored; only client.live uses it

	mu    sync.RWMutex
	by    *client // the connection, once it has delivered a listing
	known map[string]sandbox
	pods  map[string][]sandbox // by pod UID, the newest first
	ready bool
	last  error
}

// New makes a tracker. It knows nothing until Run runs.
func New(cfg Config, log *zap.Logger) *Tracker {
	party := cfg.Runtime + " at " + cfg.Socket
	return &Tracker{
		party: party, cfg: cfg, log: log, dial: sys.DialUnix,
		known: make(map[string]sandbox), pods: make(map[string][]sandbox),
		last: volume.Errorf(volume.NoSandbox, "%s has not answered yet", party),
	}
}

// OfPod lists the live sandboxes of a pod, the newest first.
func (t *Tracker) OfPod(podUID string) []string {
	t.mu.RLock()
	defer t.mu.RUnlock()
	of := t.pods[podUID]
	ids := make([]string, len(of))
	for i, s := range of {
		ids[i] = s.id
	}
	return ids
}

// PodOf returns the UID of a sandbox's pod.
func (t *Tracker) PodOf(id string) (podUID string, known bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	s, known := t.known[id]
	return s.pod, known
}

// Ready reports whether the container runtime is being followed.
func (t *Tracker) Ready() bool {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.ready
}

// LastError returns why it is not followed, or nil.
func (t *Tracker) LastError() error {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.last
}

func (t *Tracker) add(s sandbox) {
	t.mu.Lock()
	_, there := t.known[s.id]
	if !there {
		t.known[s.id] = s
		t.pods[s.pod] = append(t.pods[s.pod], s)
		slices.SortStableFunc(t.pods[s.pod], func(a, b sandbox) int { return b.created.Compare(a.created) })
	}
	t.mu.Unlock()
	if !there && t.cfg.OnAdded != nil {
		t.cfg.OnAdded(s.pod, s.id)
	}
}

func (t *Tracker) remove(id string) {
	t.mu.Lock()
	s, there := t.known[id]
	if there {
		delete(t.known, id)
		t.pods[s.pod] = slices.DeleteFunc(t.pods[s.pod], func(other sandbox) bool { return other.id == id })
		if len(t.pods[s.pod]) == 0 {
			delete(t.pods, s.pod)
		}
	}
	t.mu.Unlock()
	if there && t.cfg.OnGone != nil {
		t.cfg.OnGone(id)
	}
}

// lost records why the runtime cannot be followed now, and reports whether that is new.
// What is known stays: a sandbox does not end because its runtime restarts.
func (t *Tracker) lost(err error) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, unsupported := errors.AsType[*volume.Error](err); !unsupported {
		err = volume.Errorf(volume.NoSandbox, "%s cannot be followed; is it running? %w", t.party, err)
	}
	isNew := t.ready || t.last == nil || t.last.Error() != err.Error()
	t.by, t.ready, t.last = nil, false, err
	return isNew
}

// plain removes gRPC's prefix from an error: it does not help an operator.
func plain(err error) error {
	call, is := errors.AsType[interface {
		error
		GRPCStatus() *status.Status
	}](err)
	if !is {
		return err
	}
	return errors.New(strings.Replace(err.Error(), call.Error(), call.GRPCStatus().Message(), 1))
}

const (
	firstPause = 100 * time.Millisecond
	lastPause  = 15 * time.Second
)

// Run follows the container runtime until ctx ends, also after restarts of it.
func (t *Tracker) Run(ctx context.Context) error {
	pause := firstPause
	for ctx.Err() == nil {
		start := time.Now()
		err := plain(t.followOnce(ctx))
		isNew := t.lost(err)
		if ctx.Err() != nil {
			return nil
		}
		if time.Since(start) > lastPause {
			pause = firstPause
		}
		if isNew {
			t.log.Warn("the container runtime cannot be followed; trying again", zap.String("runtime", t.party), zap.Error(err))
		}
		// Jitter, so that many daemons do not come back to one node at once.
		sys.Sleep(ctx, pause/2+rand.N(pause/2)) //nolint:gosec // no secret hangs on it
		pause = min(2*pause, lastPause)
	}
	return nil
}

// maxMessage bounds an answer, such as a list of all containers.
const maxMessage = 16 << 20

func (t *Tracker) followOnce(ctx context.Context) error {
	conn, err := grpc.NewClient("unix:"+t.cfg.Socket,
		grpc.WithContextDialer(t.dialOnce()),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	return follow(ctx, t, conn)
}

// dialOnce dials for one connection and refuses a second one. gRPC would replace a broken connection by itself and hide
// that the container runtime was restarted, and the first listing after a restart can be empty.
func (t *Tracker) dialOnce() func(context.Context, string) (net.Conn, error) {
	var dialed atomic.Bool
	return func(ctx context.Context, _ string) (net.Conn, error) {
		if dialed.Swap(true) {
			return nil, errors.New("the connection was closed, as by a restart")
		}
		return t.dial(ctx, t.cfg.Socket)
	}
}

// ContainerIDs lists the containers of a sandbox, and the sandbox's own.
func (t *Tracker) ContainerIDs(ctx context.Context, sandboxID string) ([]string, error) {
	ids := []string{sandboxID}
	by, _, err := t.asking(sandboxID)
	if err != nil {
		return ids, err
	}
	more, err := by.containerIDs(ctx, sandboxID)
	return append(ids, more...), askError(ctx, t.party, sandboxID, err)
}

// Destinations lists where the containers of a sandbox mount path, without repeats.
func (t *Tracker) Destinations(ctx context.Context, sandboxID, path string) ([]string, error) {
	by, podUID, err := t.asking(sandboxID)
	if err != nil {
		return nil, err
	}
	found, err := by.destinations(ctx, sandboxID, podUID, path)
	return found, askError(ctx, t.party, sandboxID, err)
}

// asking returns the connection by which to ask about a live sandbox, and its pod's UID.
func (t *Tracker) asking(sandboxID string) (by *client, podUID string, err error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if t.by == nil {
		return nil, "", volume.Errorf(volume.NoSandbox, "sandbox %s: its containers cannot be looked up now: %w", sandboxID, t.last)
	}
	s, known := t.known[sandboxID]
	if !known {
		return nil, "", volume.Errorf(volume.NoSandbox, "%s has no live sandbox %s", t.party, sandboxID)
	}
	return t.by, s.pod, nil
}

// Mounting lists the live sandboxes of all pods with a container that mounts one of the paths. It queries every
// container of the node: it is for volumes whose target does not name their pod. The sandboxes include those that
// kubelet did not make. Of those in unread it cannot be told.
func (t *Tracker) Mounting(ctx context.Context, paths ...string) (found []string, unread map[string]error, err error) {
	t.mu.RLock()
	by, last := t.by, t.last
	t.mu.RUnlock()
	if by == nil {
		return nil, nil, volume.Errorf(volume.NoSandbox, "the node's containers cannot be looked up now: %w", last)
	}
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	found, unread, err = by.mounting(ctx, paths)
	return found, unread, askError(ctx, t.party, "", err)
}

// Listed asks the container runtime itself for its live sandboxes, those that kubelet did not make
// included. Of others than only, if that is given, it is not asked whether they have ended. It is an error if the
// runtime is not being followed all the while.
func (t *Tracker) Listed(ctx context.Context, only ...string) (map[string]bool, error) {
	following := func() (by *client, err error) {
		t.mu.RLock()
		defer t.mu.RUnlock()
		if t.ready {
			return t.by, nil
		}
		return nil, t.last
	}
	by, err := following()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	ids, err := by.listed(ctx, only...)
	if err != nil {
		return nil, askError(ctx, t.party, "", err)
	}
	if now, err := following(); now != by {
		return nil, volume.Errorf(volume.NoSandbox, "%s was restarted meanwhile: %w", t.party, cmp.Or(err, errors.New("ask again")))
	}
	return ids, nil
}

// replace replaces all that is known by a listing, and uses its connection from now on.
func (t *Tracker) replace(by *client, live map[string]sandbox) {
	t.mu.Lock()
	first := t.by == nil
	t.by = by
	if first && len(live) == 0 {
		// A runtime that has just started may not have read its own state yet. An empty
		// listing is believed only the second time, and the tracker is not ready until then.
		t.last = volume.Errorf(volume.NoSandbox, "%s lists no sandbox, and is asked once more", t.party)
		t.mu.Unlock()
		return
	}
	known := slices.Collect(maps.Keys(t.known))
	t.mu.Unlock()
	for _, id := range known {
		if _, lives := live[id]; !lives {
			t.remove(id)
		}
	}
	// The newest last: a pod's volumes go over to the sandbox that is added last.
	for _, s := range slices.SortedFunc(maps.Values(live), func(a, b sandbox) int { return a.created.Compare(b.created) }) {
		t.add(s)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ready, t.last = true, nil
}
