package pods

import (
	"cmp"
	"maps"
	"slices"
	"sync"
)

// pods are those of this node, and what was learned of their volumes.
type pods struct {
	// node is this node's name: a pod of another one is not taken, whatever the
	// API server says.
	node    string
	changed func()

	mu     sync.Mutex
	synced bool
	all    map[string]*known
}

// known is a pod as it was last seen. What was learned of its volumes holds for the
// pod's life: a claim never changes its volume.
type known struct {
	pod     *pod
	learned map[string]source // by the volume's name in the pod
}

// unlearned are the volumes of which it is not known who gives them.
func (k known) unlearned() []podVolume {
	var out []podVolume
	for _, v := range k.pod.volumes {
		if _, done := k.learned[v.name]; v.claim != "" && !done {
			out = append(out, v)
		}
	}
	return out
}

// sourceOf tells who gives a volume, where that is known.
func (k known) sourceOf(v podVolume) (source, bool) {
	if v.claim == "" {
		return v.given, true
	}
	s, done := k.learned[v.name]
	return s, done
}

// wants tells whether a container of the pod uses a volume that is known.
func (k known) wants(want source) bool {
	return slices.ContainsFunc(k.pod.volumes, func(v podVolume) bool {
		s, _ := k.sourceOf(v)
		return v.mounts.used && s.sameAs(want)
	})
}

// set takes a pod as it is now.
func (s *pods) set(p *pod) {
	s.mu.Lock()
	s.keep(p, s.all)
	s.mu.Unlock()
	s.changed()
}

// keep puts a pod into the store. What was learned of it before is in old.
func (s *pods) keep(p *pod, old map[string]*known) {
	if s.all == nil {
		s.all = make(map[string]*known)
	}
	now := &known{pod: p}
	if before := old[p.uid]; before != nil {
		now.learned = before.learned
	}
	s.all[p.uid] = now
}

func (s *pods) remove(uid string) {
	s.mu.Lock()
	delete(s.all, uid)
	s.mu.Unlock()
	s.changed()
}

// replace takes all pods of the node anew.
func (s *pods) replace(all []*pod) {
	s.mu.Lock()
	old := s.all
	s.all, s.synced = nil, true
	for _, p := range all {
		s.keep(p, old)
	}
	s.mu.Unlock()
	s.changed()
}

func (s *pods) ready() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.synced
}

// count gives the number of pods, and of those of which a volume is not known.
func (s *pods) count() (all, incomplete int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range s.all {
		if !k.pod.ended && len(k.unlearned()) > 0 {
			incomplete++
		}
	}
	return len(s.all), incomplete
}

// find gives a pod by the uid that kubelet has for it.
func (s *pods) find(uid string) (known, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if k := s.all[uid]; k != nil {
		return k.copy(), true
	}
	var found []known
	for _, k := range s.all {
		if k.pod.alias == uid && uid != "" {
			found = append(found, k.copy())
		}
	}
	if len(found) != 1 {
		return known{}, false // of two that say they are one, neither is believed
	}
	return found[0], true
}

func (k *known) copy() known { return known{pod: k.pod, learned: maps.Clone(k.learned)} }

// choose gives the pods that a question is about, in the order in which they were
// made.
func (s *pods) choose(fits func(known) bool) []known {
	s.mu.Lock()
	var out []known
	for _, k := range s.all {
		if fits(*k) {
			out = append(out, k.copy())
		}
	}
	s.mu.Unlock()
	slices.SortFunc(out, func(a, b known) int {
		return cmp.Or(a.pod.made.Compare(b.pod.made), cmp.Compare(a.pod.uid, b.pod.uid))
	})
	return out
}

// learn keeps who gives a volume of a pod.
func (s *pods) learn(uid, name string, from source) {
	s.mu.Lock()
	if k := s.all[uid]; k != nil {
		if k.learned == nil {
			k.learned = make(map[string]source)
		}
		k.learned[name] = from
	}
	s.mu.Unlock()
	s.changed()
}
