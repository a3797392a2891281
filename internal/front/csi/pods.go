package csi

import (
	"context"
	"path/filepath"
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
	if w.PodUID == "" {
		return nil, refusal.WithParty(refusal.PartyRequest, w.PodProblem)
	}
	pod, err := f.cfg.Pods.ByUID(ctx, w.PodUID)
	if err != nil {
		return nil, refusal.WithParty(refusal.PartyPods, err)
	}
	w.NamePod(&pod)
	return pod.ForVolume(w.Driver, w.VolumeID, w.InlineName)
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

// belowKubeletRoot is the part of a path below the kubelet root, which the caller may name by a link, or "".
func (f *Front) belowKubeletRoot(target string) string {
	if rel, err := filepath.Rel(f.cfg.KubeletRoot, target); err == nil && filepath.IsLocal(rel) {
		return rel
	}
	resolved, _ := filepath.EvalSymlinks(f.cfg.KubeletRoot) // without it no absolute path is below ""
	if rel, err := filepath.Rel(resolved, target); err == nil && filepath.IsLocal(rel) {
		return rel
	}
	return ""
}
