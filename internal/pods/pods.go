package pods

import (
	"cmp"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// pods are those of this node by their uid, and what was learned of their volumes.
type pods struct{ table table[known] }

// known is a pod as it was last seen. What was learned of its volumes holds for the
// pod's life: a claim never changes its volume. Nobody changes a known.
type known struct {
	pod     *pod
	learned map[string]source // by the volume's name in the pod
}

// readPod takes a pod of a node. One of another node decides nothing here, whatever the
// API server says.
func readPod(object any, node string) (uid string, k known) {
	found, ok := object.(*corev1.Pod)
	if !ok || found.Spec.NodeName != node {
		return "", known{}
	}
	return string(found.UID), known{pod: podOf(found)}
}

// unlearned are the volumes of which it is not known who gives them.
func (k known) unlearned() []podVolume {
	var out []podVolume
	for _, v := range k.pod.volumes {
		if _, done := k.sourceOf(v); !done {
			out = append(out, v)
		}
	}
	return out
}

// incomplete tells whether the pod, which has not ended, has a volume that is not known.
func (k known) incomplete() bool { return !k.pod.ended && len(k.unlearned()) > 0 }

// sourceOf tells who gives a volume, where that is known.
func (k known) sourceOf(v podVolume) (source, bool) {
	if v.claim == "" {
		return v.given, true
	}
	s, done := k.learned[v.Name]
	return s, done
}

// wants tells whether a container of the pod uses a volume that is known.
func (k known) wants(want source) bool {
	return slices.ContainsFunc(k.pod.volumes, func(v podVolume) bool {
		s, _ := k.sourceOf(v)
		return v.used && s.sameAs(want)
	})
}

// find gives a pod by the uid that kubelet has for it.
func (s *pods) find(uid string) (known, bool) {
	if k, there := s.table.get(uid); there {
		return k, true
	}
	found := s.choose(func(k known) bool { return k.pod.shown.UID == uid })
	if len(found) != 1 {
		return known{}, false // of two that say they are one, neither is believed
	}
	return found[0], true
}

// choose gives the pods that a question is about, in the order in which they were
// made.
func (s *pods) choose(fits func(known) bool) []known {
	out := slices.DeleteFunc(s.table.values(), func(k known) bool { return !fits(k) })
	slices.SortFunc(out, func(a, b known) int {
		return cmp.Or(a.pod.made.Compare(b.pod.made), cmp.Compare(a.pod.uid, b.pod.uid))
	})
	return out
}

// learn keeps who gives a volume of a pod.
func (s *pods) learn(uid, name string, from source) {
	s.table.change(uid, func(k known) known {
		learned := make(map[string]source, len(k.learned)+1)
		maps.Copy(learned, k.learned)
		learned[name] = from
		return known{pod: k.pod, learned: learned}
	})
}
