package pods

import (
	"maps"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/cache"
)

// table holds what is needed of all objects of one kind. A reflector of client-go fills it.
// It does not hold the objects themselves.
type table[T any] struct {
	of      kind
	health  *watchHealth
	changes *notifier
	// read extracts what is needed from an object. An object without a key is left out.
	read func(object any) (key string, value T)
	// renew, if set, carries over what was learned about the object before.
	renew func(now, before T) T

	mu     sync.Mutex
	synced bool
	all    map[string]T
}

func newTable[T any](of kind, health *watchHealth, changes *notifier, read func(any) (string, T), renew func(now, before T) T) *table[T] {
	return &table[T]{of: of, health: health, changes: changes, read: read, renew: renew, all: make(map[string]T)}
}

var (
	_ cache.TransformingStore      = (*table[string])(nil)
	_ cache.ReflectorBookmarkStore = (*table[string])(nil)
)

// update changes the table, and then wakes all that wait for a change. It never fails.
func (t *table[T]) update(change func()) error {
	t.mu.Lock()
	change()
	t.mu.Unlock()
	t.health.good(t.of.what, false)
	t.changes.notify()
	return nil
}

func (t *table[T]) Add(object any) error { return t.update(func() { t.put(object, t.all) }) }

// put stores an object. Old holds what was known about it before.
func (t *table[T]) put(object any, old map[string]T) {
	key, value := t.read(object)
	if before, there := old[key]; there && t.renew != nil {
		value = t.renew(value, before)
	}
	if key != "" {
		t.all[key] = value
	}
}

// Update replaces an object that changed.
func (t *table[T]) Update(object any) error { return t.Add(object) }

func (t *table[T]) Delete(object any) error {
	key, _ := t.read(object)
	return t.update(func() { delete(t.all, key) })
}

func (t *table[T]) Replace(objects []any, _ string) error {
	return t.update(func() {
		old := t.all
		t.all, t.synced = make(map[string]T, len(objects)), true
		for _, object := range objects {
			t.put(object, old)
		}
	})
}

// Resync does nothing.
func (t *table[T]) Resync() error { return nil }

// Bookmark records that the API server is alive.
func (t *table[T]) Bookmark(string) error {
	t.health.good(t.of.what, false)
	return nil
}

// Transformer strips objects as they are read: client-go holds the whole first list of pods in memory.
func (t *table[T]) Transformer() cache.TransformFunc {
	return func(object any) (any, error) {
		if pod, ok := object.(*corev1.Pod); ok {
			strip(pod)
		}
		return object, nil
	}
}

func strip(pod *corev1.Pod) {
	pod.ManagedFields, pod.Labels = nil, nil
	pod.Status.Conditions, pod.Spec.Tolerations, pod.Spec.Affinity = nil, nil, nil
	for _, all := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range all {
			all[i] = corev1.Container{
				Name: all[i].Name, RestartPolicy: all[i].RestartPolicy, VolumeMounts: all[i].VolumeMounts, VolumeDevices: all[i].VolumeDevices,
			}
		}
	}
}

// current reports whether all objects are known, and changes are followed.
func (t *table[T]) current() bool { return t.ready() && t.health.problem(identity, t.of.what) == nil }

// ready reports whether all objects are known.
func (t *table[T]) ready() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.synced
}

func (t *table[T]) get(key string) (value T, there bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	value, there = t.all[key]
	return value, there
}

func (t *table[T]) values() []T {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Collect(maps.Values(t.all))
}

// change replaces what is known about an object, if it exists.
func (t *table[T]) change(key string, to func(T) T) {
	t.mu.Lock()
	if value, there := t.all[key]; there {
		t.all[key] = to(value)
	}
	t.mu.Unlock()
	t.changes.notify()
}

// notifier wakes all that wait for a change of what is known.
type notifier struct {
	mu   sync.Mutex
	next chan struct{}
}

// wait returns a channel that is closed at the next change. Call it before reading the
// state, so that no change is missed.
func (n *notifier) wait() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.next == nil {
		n.next = make(chan struct{})
	}
	return n.next
}

func (n *notifier) notify() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.next != nil {
		close(n.next)
		n.next = nil
	}
}
