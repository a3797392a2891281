package front

import (
	"context"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// The keys by which kubelet tells a driver of the pod, where the driver wants that.
const (
	podUIDKey       = "csi.storage.k8s.io/pod.uid"
	podNamespaceKey = "csi.storage.k8s.io/pod.namespace"
	podNameKey      = "csi.storage.k8s.io/pod.name"
	ephemeralKey    = "csi.storage.k8s.io/ephemeral"
)

// forPod is the pod of a publish, and the volume in it.
type forPod struct {
	*Pod
	// volume is what is known of the volume in the pod; missing says why it is nil.
	volume  *PodVolume
	missing error
	// annotated is set where the pod's annotation asks for the volume.
	annotated bool
}

// podFor gives the pod that a publish is for, or nil where no cluster is asked.
func (n *node) podFor(ctx context.Context, w wanted, target string) (*forPod, error) {
	if n.cfg.Pods == nil {
		return nil, nil //nolint:nilnil // no pod is a fact, not a failure
	}
	uid, err := n.podUID(w, target)
	if err != nil || uid == "" {
		return nil, by(deferral.PartyRequest, err)
	}
	pod, err := n.cfg.Pods.ByUID(ctx, uid)
	if err != nil {
		return nil, by(deferral.PartyPods, err)
	}
	return pod.forVolume(w.id, n.inlineName(w, target))
}

// forVolume picks the volume out, and reads what the pod asks for.
func (p *Pod) forVolume(id volumeID, inline string) (*forPod, error) {
	out := &forPod{Pod: p}
	asked, err := p.asks()
	if err != nil {
		return out, by(deferral.PartyPod, err)
	}
	names := p.namesOf(id, inline)
	if len(names) == 0 {
		out.missing = by(deferral.PartyPods, p.noVolume(id))
		if !asked.Nothing() {
			return out, out.missing
		}
		return out, nil
	}
	out.volume = p.together(names)
	out.annotated = slices.ContainsFunc(names, asked.Asks)
	return out, nil
}

// asks reads the annotation. A name in it that stands for no volume is an error of
// whoever wrote it, who would otherwise believe that the volume is deferred.
func (p *Pod) asks() (deferral.Asked, error) {
	asked, err := deferral.ParseAnnotation(p.Asks)
	if err != nil {
		return asked, err
	}
	for _, name := range asked.Names {
		i := slices.IndexFunc(p.Volumes, func(v PodVolume) bool { return v.Name == name })
		switch {
		case i < 0:
			return asked, deferral.Errorf(deferral.Invalid, "the pod's annotation %s names %q, and the pod has no volume of that name "+
				"that a CSI driver gives: correct the annotation", AnnotationDefer, name)
		case p.Volumes[i].Block:
			return asked, deferral.Errorf(deferral.Invalid, "the pod's annotation %s names %q, which is a raw block volume and has no "+
				"filesystem to defer: take it out of the annotation", AnnotationDefer, name)
		}
	}
	return asked, nil
}

// namesOf are the volume's names in the pod: one claim may have several. An inline
// volume is known by its name, which is in its target.
func (p *Pod) namesOf(id volumeID, inline string) []string {
	var names []string
	for _, v := range p.Volumes {
		if (v.Driver == id.driver && v.VolumeID == id.id) || (inline != "" && v.Name == inline && v.Driver == id.driver) {
			names = append(names, v.Name)
		}
	}
	return names
}

// noVolume is why a volume of the pod cannot be told.
func (p *Pod) noVolume(id volumeID) error {
	for _, v := range p.Volumes {
		if v.Unknown != nil {
			return deferral.Errorf(deferral.KindOf(v.Unknown), "it is not known which of the pod's volumes it is: %w", v.Unknown)
		}
	}
	return deferral.Errorf(deferral.Busy, "the cluster does not tell of a volume %s of driver %s in the pod: it is asked again",
		clip(id.id), id.driver)
}

// together is what the containers do with a volume under all of its names.
func (p *Pod) together(names []string) *PodVolume {
	out := &PodVolume{ReadOnlyMounts: true}
	for _, v := range p.Volumes {
		if !slices.Contains(names, v.Name) {
			continue
		}
		if out.Name == "" {
			out.Name = v.Name
		}
		out.SubPaths = append(out.SubPaths, v.SubPaths...)
		out.ReadOnlyMounts = out.ReadOnlyMounts && v.ReadOnlyMounts
	}
	return out
}

// podUID is the pod of a publish: by kubelet's word, and by where the target lies,
// for not every driver is given that word.
func (n *node) podUID(w wanted, target string) (string, error) {
	told, lies := w.context[podUIDKey], ""
	if parts := n.belowRoot(target); len(parts) > 3 && parts[0] == "pods" && parts[2] == "volumes" {
		lies = parts[1]
	}
	switch {
	case told == "":
		return lies, nil
	case lies == "" || lies == told:
		return told, nil
	default:
		return "", deferral.Errorf(deferral.Invalid, "%s says that it is for the pod %s, and its target lies in the directory of the pod "+
			"%s: one of them is wrong, so nothing is published; look at who calls the driver", podUIDKey, clip(told), clip(lies))
	}
}

// inlineName is the name of an inline ephemeral volume in its pod, or "".
func (n *node) inlineName(w wanted, target string) string {
	if parts := n.belowRoot(target); w.context[ephemeralKey] == "true" && len(parts) == 6 && parts[3] == "kubernetes.io~csi" {
		return parts[4]
	}
	return ""
}

// belowRoot are the elements of a path below the kubelet root, which the caller may
// name by a link.
func (n *node) belowRoot(target string) []string {
	for _, root := range []func() (string, error){
		func() (string, error) { return n.cfg.KubeletRoot, nil },
		func() (string, error) { return filepath.EvalSymlinks(n.cfg.KubeletRoot) },
	} {
		dir, err := root()
		if err != nil {
			continue
		}
		if rel, err := filepath.Rel(dir, path.Clean(target)); err == nil && filepath.IsLocal(rel) {
			return strings.Split(rel, "/")
		}
	}
	return nil
}

// podNames are a pod's namespace and name: as the cluster tells them, or as
// kubelet does.
func podNames(pod *Pod, w wanted) (namespace, name string) {
	if pod != nil {
		return oneLine(pod.Namespace), oneLine(pod.Name)
	}
	namespace, name = w.context[podNamespaceKey], w.context[podNameKey]
	if len(namespace) > maxObjectName || len(name) > maxObjectName {
		return "", ""
	}
	return oneLine(namespace), oneLine(name)
}

// maxObjectName is the longest name that Kubernetes takes.
const maxObjectName = 253
