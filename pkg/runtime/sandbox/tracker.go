// Package sandbox follows containerd: which sandboxes a pod has, and when one
// comes or goes.
//
// It speaks containerd's gRPC API through the generated module, not through the
// client library: listing containers and reading events needs a tenth of that
// code, and the wire is the same for containerd 1.6, 1.7 and 2.x.
package sandbox

import (
	"context"
	"errors"
	"math/rand/v2"
	"regexp"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// Config says where containerd is and who wants to know.
type Config struct {
	Socket    string
	Namespace string
	// OnAdded and OnGone are told of sandboxes that came and went. They are
	// called one at a time and must not block; they may be nil.
	OnAdded func(podUID, id string)
	OnGone  func(id string)
}

// Tracker knows the live sandboxes. Its look-ups are from memory.
type Tracker struct {
	cfg Config
	log *zap.Logger

	mu    sync.RWMutex
	known map[string]sandbox
	pods  map[string][]string // sandbox ids by pod UID, the newest first
	ready bool
	last  error

	client struct {
		sync.Mutex
		*client
	}
}

// sandbox is a live one.
type sandbox struct {
	id      string
	pod     string
	runtime string
	created time.Time
}

// New makes a tracker that knows nothing until Run runs.
func New(cfg Config, log *zap.Logger) *Tracker {
	return &Tracker{
		cfg: cfg, log: log, known: make(map[string]sandbox), pods: make(map[string][]string),
		last: errors.New("containerd has not answered yet"),
	}
}

// Ids come from outside and become parts of paths elsewhere.
var (
	idForm  = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$`)
	podForm = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9-]{0,63}$`)
)

const (
	firstPause = 100 * time.Millisecond
	lastPause  = 15 * time.Second
)

// Run follows containerd until ctx ends, over its restarts and absences.
func (t *Tracker) Run(ctx context.Context) error {
	pause := firstPause
	for ctx.Err() == nil {
		start := time.Now()
		err := t.follow(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if time.Since(start) > lastPause {
			pause = firstPause
		}
		if t.lost(err) {
			t.log.Warn("containerd cannot be followed; trying again", zap.Error(err))
		}
		// Jitter, so that many daemons do not come back to one node at once.
		wait := pause/2 + rand.N(pause/2) //nolint:gosec // no secret hangs on it
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
		pause = min(2*pause, lastPause)
	}
	return nil
}

// lost notes that nothing new is learned for now, and tells whether that is new.
// What is known stays: a sandbox does not end because containerd restarts.
func (t *Tracker) lost(err error) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	isNew := t.ready || t.last == nil || t.last.Error() != err.Error()
	t.ready, t.last = false, err
	return isNew
}

// Ready tells whether containerd is being followed.
func (t *Tracker) Ready() bool {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.ready
}

// LastError tells why not.
func (t *Tracker) LastError() error {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.last
}

// OfPod lists the live sandboxes of a pod, the newest first.
func (t *Tracker) OfPod(podUID string) []string {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return slices.Clone(t.pods[podUID])
}

// PodOf tells the pod of a sandbox.
func (t *Tracker) PodOf(id string) (podUID string, known bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	s, known := t.known[id]
	return s.pod, known
}

// Runtime tells the runtime that a sandbox was made with, such as
// "io.containerd.kata.v2".
func (t *Tracker) Runtime(id string) string {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.known[id].runtime
}

// add makes a sandbox known.
func (t *Tracker) add(s sandbox) {
	t.mu.Lock()
	_, there := t.known[s.id]
	if !there {
		t.known[s.id] = s
		t.indexPod(s.pod)
	}
	t.mu.Unlock()
	if !there && t.cfg.OnAdded != nil {
		t.cfg.OnAdded(s.pod, s.id)
	}
}

// remove forgets a sandbox that went.
func (t *Tracker) remove(id string) {
	t.mu.Lock()
	s, there := t.known[id]
	if there {
		delete(t.known, id)
		t.indexPod(s.pod)
	}
	t.mu.Unlock()
	if there && t.cfg.OnGone != nil {
		t.cfg.OnGone(id)
	}
}

// indexPod brings the list of a pod's sandboxes up to date. A pod has one or
// two, so that looking through what it had is cheap.
func (t *Tracker) indexPod(pod string) {
	var of []sandbox
	for _, s := range t.known {
		if s.pod == pod {
			of = append(of, s)
		}
	}
	if len(of) == 0 {
		delete(t.pods, pod)
		return
	}
	slices.SortFunc(of, func(a, b sandbox) int { return b.created.Compare(a.created) })
	ids := make([]string, len(of))
	for i, s := range of {
		ids[i] = s.id
	}
	t.pods[pod] = ids
}

// replace makes the known sandboxes those of a fresh listing.
func (t *Tracker) replace(live map[string]sandbox) {
	t.mu.RLock()
	var gone []string
	for id := range t.known {
		if _, still := live[id]; !still {
			gone = append(gone, id)
		}
	}
	t.mu.RUnlock()
	for _, id := range gone {
		t.remove(id)
	}
	for _, s := range live {
		t.add(s)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ready, t.last = true, nil
}

// current gives the connection that Run has made.
func (t *Tracker) current() (*client, error) {
	t.client.Lock()
	defer t.client.Unlock()
	if t.client.client == nil {
		return nil, deferral.Errorf(deferral.NoSandbox, "containerd at %s cannot be asked now: %w", t.cfg.Socket, t.LastError())
	}
	return t.client.client, nil
}

func (t *Tracker) setCurrent(c *client) {
	t.client.Lock()
	defer t.client.Unlock()
	t.client.client = c
}
