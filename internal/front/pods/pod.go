package pods

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/decision"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// pod is the part of a pod that decides about its volumes. It is never changed.
type pod struct {
	uid string // in the API server
	// shown is the pod for the front. Its handler and volumes are filled in at each lookup.
	// Its UID is the one that kubelet uses.
	shown          decision.Pod
	made           time.Time
	class          string // its runtime class; "" is none
	ended, deleted bool
	volumes        []podVolume
}

// podVolume is a volume of a pod that may be a CSI volume, as the pod's spec has it.
type podVolume struct {
	// PodVolume is the volume for the front. Its driver and id are filled in at each lookup.
	decision.PodVolume
	used, writable bool // by a container
	// own is set for an ephemeral volume, whose claim the pod must own.
	own   bool
	given source // of an inline volume, which has no claim
}

// source is the CSI volume behind a pod's volume. The zero source is no CSI volume.
type source struct {
	driver, id    string
	fsType, class string            // class is the storage class, or ""
	mode          string            // the access mode that kubelet uses
	context       map[string]string // of its attributes, the one that decides
	// once is set if one node at a time may mount it. By default, kubelet changes the group
	// of the files of such volumes only.
	once  bool
	owner string // the uid of the pod whose ephemeral volume it is, or ""
}

func (p *pod) String() string { return p.shown.Namespace + "/" + p.shown.Name }

func podOf(api *corev1.Pod) *pod {
	asks := api.Annotations[policy.AnnotationKey]
	p := &pod{
		uid: string(api.UID), made: api.CreationTimestamp.Time, ended: ended(&api.Status), deleted: api.DeletionTimestamp != nil,
		shown: decision.Pod{
			UID: cmp.Or(staticUID(api), string(api.UID)), Namespace: api.Namespace, Name: api.Name,
			Asks: strings.Clone(asks[:min(len(asks), policy.MaxAnnotation+1)]), // a longer one stays too long
		},
	}
	if api.Spec.RuntimeClassName != nil {
		p.class = *api.Spec.RuntimeClassName
	}
	if security := api.Spec.SecurityContext; security != nil {
		if security.FSGroup != nil {
			p.shown.FSGroup = strconv.FormatInt(*security.FSGroup, 10)
		}
		if p.shown.FSGroup != "" && security.FSGroupChangePolicy != nil {
			p.shown.FSGroupPolicy = volume.GroupPolicy(*security.FSGroupChangePolicy)
		}
	}
	for i := range api.Spec.Volumes {
		v, ok := volumeOf(p, &api.Spec.Volumes[i])
		if ok && len(p.volumes) == maxVolumes {
			p.shown.MoreVolumes = true
			break
		} else if ok {
			p.volumes = append(p.volumes, v)
		}
	}
	p.noteMounts(&api.Spec)
	return p
}

// maxVolumes is more than a node can attach. The rest of a pod's CSI volumes are not deferred,
// so that a pod's author cannot keep us busy.
const maxVolumes = 256

// staticUID returns the uid that kubelet uses for a static pod, of which the API server has
// only a mirror, and "" for any other pod. Anybody can write annotations: a value in the
// form of the API server's own uids is refused, so that no pod can pass for another one.
func staticUID(api *corev1.Pod) string {
	alias, mirror := api.Annotations[corev1.MirrorPodAnnotationKey]
	ofNode := slices.ContainsFunc(api.OwnerReferences, func(owner metav1.OwnerReference) bool {
		return owner.Kind == "Node" && owner.Name == api.Spec.NodeName
	})
	if !mirror || !ofNode || len(alias) > 64 || strings.Contains(alias, "-") || alias != api.Annotations[hashAnnotation] {
		return ""
	}
	return alias
}

// hashAnnotation is where kubelet writes its uid of a static pod.
const hashAnnotation = "kubernetes.io/config.hash"

// ended reports whether no container of the pod runs or will run.
func ended(status *corev1.PodStatus) bool {
	return (status.Phase == corev1.PodSucceeded || status.Phase == corev1.PodFailed) &&
		!slices.ContainsFunc(slices.Concat(status.InitContainerStatuses, status.ContainerStatuses, status.EphemeralContainerStatuses),
			func(s corev1.ContainerStatus) bool { return s.State.Running != nil })
}

// volumeOf returns a volume that may be a CSI volume; ok is false for all others.
func volumeOf(p *pod, api *corev1.Volume) (v podVolume, ok bool) {
	v.Name = api.Name
	switch {
	case api.PersistentVolumeClaim != nil:
		v.Claim, v.ReadOnly = api.PersistentVolumeClaim.ClaimName, api.PersistentVolumeClaim.ReadOnly
	case api.Ephemeral != nil:
		v.Claim, v.own = p.shown.Name+"-"+api.Name, true
	case api.CSI != nil:
		v.given = source{driver: api.CSI.Driver, id: inlineID(p.shown.UID, api.Name), once: true, context: deciding(api.CSI.VolumeAttributes)}
		if api.CSI.FSType != nil {
			v.given.fsType = *api.CSI.FSType
		}
		v.ReadOnly = api.CSI.ReadOnly != nil && *api.CSI.ReadOnly
	default:
		v.given = inTreeInline(api, p.shown.Namespace)
		return v, v.given.driver != ""
	}
	return v, true
}

// deciding returns the attribute by which a volume says whether it is to be deferred.
func deciding(attributes map[string]string) map[string]string {
	value, there := attributes[policy.ContextKey]
	if !there {
		return nil
	}
	return map[string]string{policy.ContextKey: strings.Clone(value[:min(len(value), 64)])} // a longer one is an error too
}

// inlineID is the volume id that kubelet derives for an inline volume.
func inlineID(podUID, name string) string {
	return fmt.Sprintf("csi-%x", sha256.Sum256([]byte(podUID+name)))
}

// Some subPaths and containers are kept, for errors and warnings.
const (
	maxSubPaths = 16
	maxSubPath  = 256
)

// noteMounts records how all containers, including init and ephemeral ones, use the pod's volumes.
func (p *pod) noteMounts(spec *corev1.PodSpec) {
	byName := make(map[string]*podVolume, len(p.volumes))
	for i := range p.volumes {
		byName[p.volumes[i].Name] = &p.volumes[i]
	}
	note := func(c *corev1.Container, stays bool) {
		for _, mount := range c.VolumeMounts {
			if v := byName[mount.Name]; v != nil {
				v.noteMount(c.Name, &mount, stays)
			}
		}
		for _, device := range c.VolumeDevices {
			if v := byName[device.Name]; v != nil {
				v.used, v.Block, v.writable = true, true, true
				v.noteUse(c.Name)
			}
		}
	}
	for i := range spec.InitContainers {
		c := &spec.InitContainers[i]
		isSidecar := c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways
		note(c, isSidecar)
	}
	for i := range spec.Containers {
		note(&spec.Containers[i], true)
	}
	for i := range spec.EphemeralContainers {
		note((*corev1.Container)(&spec.EphemeralContainers[i].EphemeralContainerCommon), true)
	}
	for i := range p.volumes {
		p.volumes[i].ReadOnlyMounts = p.volumes[i].used && !p.volumes[i].writable
	}
}

// noteMount records how a container mounts the volume. If it stays, it runs beside the
// others; otherwise it ends before they start.
func (v *podVolume) noteMount(container string, mount *corev1.VolumeMount, stays bool) {
	v.used = true
	v.noteUse(container)
	v.writable = v.writable || !mount.ReadOnly
	for _, sub := range []string{mount.SubPath, mount.SubPathExpr} {
		sub = strings.ToValidUTF8(sub[:min(len(sub), maxSubPath)], "")
		if sub != "" {
			v.SubPaths = noted(v.SubPaths, sub)
		}
	}
	if stays {
		v.Together = noted(v.Together, container)
	}
	if strings.Contains(path.Base(mount.MountPath), " ") {
		v.Spaced = noted(v.Spaced, container)
	}
}

// noteUse records one mount of the volume by a container, at most two per container.
func (v *podVolume) noteUse(container string) {
	times := 0
	for _, name := range v.Mounts {
		if name == container {
			times++
		}
	}
	if times < 2 && len(v.Mounts) < 2*maxSubPaths {
		v.Mounts = append(v.Mounts, strings.Clone(container))
	}
}

func noted(names []string, name string) []string {
	if len(names) >= maxSubPaths || slices.Contains(names, name) {
		return names
	}
	return append(names, strings.Clone(name))
}

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
