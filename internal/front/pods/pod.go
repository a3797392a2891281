package pods

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

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
	for i := range api.Spec.Volumes[:min(len(api.Spec.Volumes), maxVolumes)] {
		if v, ok := volumeOf(p, &api.Spec.Volumes[i]); ok {
			p.volumes = append(p.volumes, v)
		}
	}
	p.noteMounts(&api.Spec)
	return p
}

// maxVolumes is more than a node can attach. The rest of a pod's volumes are not deferred,
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
