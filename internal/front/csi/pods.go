package csi

import (
	"cmp"
	"context"
	"path"
	"path/filepath"
	"strings"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/decision"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/front/kubelet"
)

// podFor looks up the pod that a publish is for. It returns nil where no cluster is asked.
func (f *Front) podFor(ctx context.Context, w *decision.VolumeRequest) (*decision.PodContext, error) {
	if f.cfg.Pods == nil {
		return nil, nil //nolint:nilnil // no pod is a fact, not a failure
	}
	uid, err := f.podUID(w)
	if err != nil || uid == "" {
		return nil, refusal.WithParty(refusal.PartyRequest, err)
	}
	pod, err := f.cfg.Pods.ByUID(ctx, uid)
	if err != nil {
		return nil, refusal.WithParty(refusal.PartyPods, err)
	}
	return pod.ForVolume(w.Driver, w.VolumeID, f.inlineName(w))
}

// podNameTimeout bounds how long an error waits for the name of the pod that it is about.
const podNameTimeout = time.Second

// podAt names the pod of a target, or the target where the pod is not known.
func (f *Front) podAt(ctx context.Context, target string) string {
	if f.cfg.Pods == nil {
		return target
	}
	uid := kubelet.PodUID(f.belowKubeletRoot(target))
	if uid == "" {
		return target
	}
	ctx, cancel := context.WithTimeout(ctx, podNameTimeout)
	defer cancel()
	pod, err := f.cfg.Pods.ByUID(ctx, uid)
	if err != nil || pod.Name == "" {
		return target
	}
	return decision.PodText(refusal.OneLine(pod.Namespace), refusal.OneLine(pod.Name))
}

// podUID is the pod of a publish: as kubelet names it, and as the target's path does, for
// kubelet does not name it to every driver.
func (f *Front) podUID(w *decision.VolumeRequest) (string, error) {
	named, ofTarget := w.Context[decision.PodUIDKey], kubelet.PodUID(f.belowKubeletRoot(w.Path))
	if named != "" && ofTarget != "" && named != ofTarget {
		return "", decision.PodsDiffer(named, ofTarget)
	}
	return cmp.Or(named, ofTarget), nil
}

// inlineName is the name of an inline ephemeral volume in its pod, or "".
func (f *Front) inlineName(w *decision.VolumeRequest) string {
	if parts := strings.Split(f.belowKubeletRoot(w.Path), "/"); w.Inline && len(parts) == 6 && parts[3] == "kubernetes.io~csi" {
		return parts[4]
	}
	return ""
}

// belowKubeletRoot is the part of a path below the kubelet root, which the caller may name
// by a link, or "".
func (f *Front) belowKubeletRoot(target string) string {
	resolved, _ := filepath.EvalSymlinks(f.cfg.KubeletRoot) // without it no absolute path is below ""
	for _, root := range []string{f.cfg.KubeletRoot, resolved} {
		if rel, err := filepath.Rel(root, path.Clean(target)); err == nil && filepath.IsLocal(rel) {
			return rel
		}
	}
	return ""
}
