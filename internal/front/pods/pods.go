package pods

import (
	"cmp"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
)

// pods holds the pods of this node by uid, with what was learned about their volumes.
type pods struct{ table *table[known] }

func newPods(node string, health *watchHealth, changes *notifier) *pods {
	of := kind{
		what: allPods, group: coreGroup, resource: "pods", selector: fields.OneTermEqualSelector("spec.nodeName", node).String(),
		example: &corev1.Pod{}, list: &corev1.PodList{},
	}
	read := func(object any) (uid string, k known) {
		found, ok := object.(*corev1.Pod)
		if !ok || found.Spec.NodeName != node { // a pod of another node is left out, even if the API server sends it
			return "", known{}
		}
		return string(found.UID), known{pod: podOf(found)}
	}
	renew := func(now, before known) known { return known{pod: now.pod, learned: before.learned} }
	return &pods{newTable(of, health, changes, read, renew)}
}

// problem is why this node's pods cannot be followed, or nil.
func (s *pods) problem() error { return s.table.health.problem(identity, allPods) }

// known is a pod as it was last seen. What was learned about its volumes holds for the
// pod's life: a claim never changes its volume. A known is never changed.
type known struct {
	pod     *pod
	learned map[string]source // by the volume's name in the pod
}

// unlearned returns the volumes whose source is not known yet.
func (k known) unlearned() (out []podVolume) {
	for _, v := range k.pod.volumes {
		if _, done := k.sourceOf(v); !done {
			out = append(out, v)
		}
	}
	return out
}

// incomplete reports whether the pod has not ended and has a volume whose source is not known.
func (k known) incomplete() bool { return !k.pod.ended && len(k.unlearned()) > 0 }

func (k known) sourceOf(v podVolume) (source, bool) {
	if v.Claim == "" {
		return v.given, true
	}
	s, done := k.learned[v.Name]
	return s, done
}

// wants reports whether a container of the pod is known to use a volume.
func (k known) wants(want source) bool {
	return slices.ContainsFunc(k.pod.volumes, func(v podVolume) bool {
		s, _ := k.sourceOf(v)
		return v.used && s.driver != "" && s.driver == want.driver && s.id == want.id
	})
}

// find returns a pod by the uid that kubelet uses for it.
func (s *pods) find(uid string) (known, bool) {
	if k, there := s.table.get(uid); there {
		return k, true
	}
	found := s.choose(func(k known) bool { return k.pod.shown.UID == uid })
	if len(found) != 1 {
		return known{}, false // of two pods that claim one uid, neither is believed
	}
	return found[0], true
}

// choose returns the pods that fit, the oldest first.
func (s *pods) choose(fits func(known) bool) []known {
	out := slices.DeleteFunc(s.table.values(), func(k known) bool { return !fits(k) })
	slices.SortFunc(out, func(a, b known) int {
		return cmp.Or(a.pod.made.Compare(b.pod.made), cmp.Compare(a.pod.uid, b.pod.uid))
	})
	return out
}

// learn records the source of a volume of a pod.
func (s *pods) learn(uid, name string, from source) {
	s.table.change(uid, func(k known) known {
		learned := make(map[string]source, len(k.learned)+1)
		maps.Copy(learned, k.learned)
		learned[name] = from
		return known{pod: k.pod, learned: learned}
	})
}
