package sandbox

import (
	"maps"
	"regexp"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// sandbox is a live one.
type sandbox struct {
	id      string
	pod     string
	runtime string
	// handler is the RuntimeClass's; nil where the runtime did not tell.
	handler *string
	created time.Time
}

// Ids come from outside and become parts of paths elsewhere.
var (
	idForm      = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$`)
	podForm     = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9-]{0,63}$`)
	handlerForm = regexp.MustCompile(`^([A-Za-z0-9][A-Za-z0-9_.-]{0,127})?$`)
)

// Live is what is known of the live sandboxes, whoever tells of them. Its
// look-ups are from memory.
type Live struct {
	party   string // who tells, and where
	log     *zap.Logger
	onAdded func(podUID, id string)
	onGone  func(id string)

	mu    sync.RWMutex
	known map[string]sandbox
	pods  map[string][]sandbox // by pod UID, the newest first
	ready bool
	last  error
}

func newLive(party string, onAdded func(podUID, id string), onGone func(id string), log *zap.Logger) *Live {
	return &Live{
		party: party, log: log, onAdded: onAdded, onGone: onGone,
		known: make(map[string]sandbox), pods: make(map[string][]sandbox),
		last: deferral.Errorf(deferral.NoSandbox, "%s has not answered yet", party),
	}
}

// OfPod lists the live sandboxes of a pod, the newest first.
func (l *Live) OfPod(podUID string) []string {
	l.mu.RLock()
	defer l.mu.RUnlock()
	of := l.pods[podUID]
	ids := make([]string, len(of))
	for i, s := range of {
		ids[i] = s.id
	}
	return ids
}

// PodOf tells the pod of a sandbox.
func (l *Live) PodOf(id string) (podUID string, known bool) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	s, known := l.known[id]
	return s.pod, known
}

// Handler tells the RuntimeClass handler that a sandbox was asked for with, such
// as "kata"; the empty one is the runtime's default.
func (l *Live) Handler(id string) (handler string, known bool) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if s := l.known[id]; s.handler != nil {
		return *s.handler, true
	}
	return "", false
}

// Runtime tells the runtime that a sandbox was made with, such as
// "io.containerd.kata.v2"; the CRI does not tell it.
func (l *Live) Runtime(id string) string {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.known[id].runtime
}

// Ready tells whether the container runtime is being followed.
func (l *Live) Ready() bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.ready
}

// LastError tells why not.
func (l *Live) LastError() error {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.last
}

// goodHandler gives the handler as it is kept: nil for one that is none.
func (l *Live) goodHandler(id, handler string) *string {
	if !handlerForm.MatchString(handler) {
		l.log.Warn("a sandbox's runtime handler has an odd name, and is ignored",
			zap.String("id", id), zap.String("handler", clip(handler)))
		return nil
	}
	return &handler
}

// good tells whether a sandbox can be one of kubelet's, and logs one that
// cannot.
func (l *Live) good(s sandbox) bool {
	if idForm.MatchString(s.id) && podForm.MatchString(s.pod) {
		return true
	}
	l.log.Warn("a sandbox with an odd id or pod UID is ignored", zap.String("id", clip(s.id)), zap.String("pod", clip(s.pod)))
	return false
}

// ids lists all that is known.
func (l *Live) ids() []string {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return slices.Collect(maps.Keys(l.known))
}

// add makes a sandbox known.
func (l *Live) add(s sandbox) {
	l.mu.Lock()
	_, there := l.known[s.id]
	if !there {
		l.known[s.id] = s
		l.pods[s.pod] = append(l.pods[s.pod], s)
		slices.SortStableFunc(l.pods[s.pod], func(a, b sandbox) int { return b.created.Compare(a.created) })
	}
	l.mu.Unlock()
	if !there && l.onAdded != nil {
		l.onAdded(s.pod, s.id)
	}
}

// remove forgets a sandbox that went.
func (l *Live) remove(id string) {
	l.mu.Lock()
	s, there := l.known[id]
	if there {
		delete(l.known, id)
		l.pods[s.pod] = slices.DeleteFunc(l.pods[s.pod], func(other sandbox) bool { return other.id == id })
		if len(l.pods[s.pod]) == 0 {
			delete(l.pods, s.pod)
		}
	}
	l.mu.Unlock()
	if there && l.onGone != nil {
		l.onGone(id)
	}
}

// lost notes that nothing new is learned for now, and tells whether that is new.
// What is known stays: a sandbox does not end because its runtime restarts.
func (l *Live) lost(err error) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	err = deferral.Errorf(deferral.NoSandbox, "%s cannot be followed; is it running? %w", l.party, err)
	isNew := l.ready || l.last == nil || l.last.Error() != err.Error()
	l.ready, l.last = false, err
	return isNew
}

// found notes that what is known is what there is.
func (l *Live) found() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ready, l.last = true, nil
}
