package sandbox

import (
	"maps"
	"regexp"
	"slices"
	"time"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	"go.uber.org/zap"
)

// sandbox is a live one.
type sandbox struct {
	id      string
	pod     string
	runtime string
	created time.Time
}

// Ids come from outside and become parts of paths elsewhere.
var (
	idForm  = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$`)
	podForm = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9-]{0,63}$`)
)

// sandboxOf reads a sandbox from its container. Whatever does not look like one
// of CRI's is none.
func (t *Tracker) sandboxOf(c *containersapi.Container) (sandbox, bool) {
	if c.GetLabels()[kindLabel] != kindSandbox {
		return sandbox{}, false
	}
	pod := c.GetLabels()[podLabel]
	if !idForm.MatchString(c.GetID()) || !podForm.MatchString(pod) {
		t.log.Warn("a sandbox with an odd id or pod UID is ignored",
			zap.String("id", clip(c.GetID())), zap.String("pod", clip(pod)))
		return sandbox{}, false
	}
	return sandbox{
		id: c.GetID(), pod: pod, runtime: clip(c.GetRuntime().GetName()), created: c.GetCreatedAt().AsTime(),
	}, true
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

// ids lists all that is known.
func (t *Tracker) ids() []string {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return slices.Collect(maps.Keys(t.known))
}

// add makes a sandbox known.
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

// remove forgets a sandbox that went.
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
