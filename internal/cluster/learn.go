package cluster

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// atOnce bounds of how many volumes of one pod the API server is asked at a time.
const atOnce = 4

// learn asks who gives the volumes of a pod that are not known, and keeps it. It
// gives the errors by the volumes' names.
func (c *Cluster) learn(ctx context.Context, k known) map[string]error {
	open := k.unlearned()
	if len(open) == 0 {
		return nil
	}
	var mu sync.Mutex
	failed := make(map[string]error)
	var group errgroup.Group
	group.SetLimit(atOnce)
	for _, v := range open {
		group.Go(func() error {
			found, err := c.sourceOf(ctx, k.pod, v)
			if err != nil {
				mu.Lock()
				failed[v.name] = err
				mu.Unlock()
				return nil // the others are worth knowing all the same
			}
			c.pods.learn(k.uid, v.name, found)
			return nil
		})
	}
	_ = group.Wait() // no part of it gives an error
	return failed
}

// sourceOf asks who gives a pod's volume.
func (c *Cluster) sourceOf(ctx context.Context, p *pod, v volume) (source, error) {
	if err := c.contact.problem(identity, allPods); err != nil {
		return source{}, deferral.Errorf(deferral.Timeout, "the claim %s/%s of pod %s is not known, and %w", p.namespace, v.claim, p, err)
	}
	found, err := c.claim(ctx, p.namespace, v.claim)
	if err != nil {
		return source{}, err
	}
	if v.own && string(found.owner) != p.uid {
		return source{}, deferral.Errorf(deferral.Busy, "the claim %s/%s was not made for the pod's own volume %s: delete the claim, "+
			"or name the pod otherwise", p.namespace, v.claim, v.name)
	}
	return found.source, nil
}

// claimed is a claim that is bound: the pod that it was made for, and who gives it.
type claimed struct {
	owner  types.UID
	source source
}

// claim gets a claim and its volume. All who ask for one at a time share the answer;
// nobody waits for it beyond his own time.
func (c *Cluster) claim(ctx context.Context, namespace, name string) (claimed, error) {
	shared := c.gets.DoChan(namespace+"/"+name, func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), getTime)
		defer cancel()
		return c.getClaim(ctx, namespace, name)
	})
	select {
	case done := <-shared:
		found, _ := done.Val.(claimed)
		return found, done.Err
	case <-ctx.Done():
		return claimed{}, deferral.Errorf(deferral.Timeout, "the claim %s/%s is not known: the API server %s did not answer in time: %w",
			namespace, name, c.host(), ctx.Err())
	}
}

func (c *Cluster) getClaim(ctx context.Context, namespace, name string) (claimed, error) {
	client := c.api.Load()
	if client == nil {
		return claimed{}, deferral.Errorf(deferral.Timeout, "the claim %s/%s is not known: no API server was asked yet", namespace, name)
	}
	what := fmt.Sprintf("the claim %s/%s", namespace, name)
	claim, err := client.claim(ctx, namespace, name)
	if err != nil {
		return claimed{}, c.unknown(what, err)
	}
	if claim.Status.Phase != corev1.ClaimBound || claim.Spec.VolumeName == "" {
		return claimed{}, deferral.Errorf(deferral.Busy, "%s is not bound to a volume yet", what)
	}
	pv, err := client.volume(ctx, claim.Spec.VolumeName)
	if err != nil {
		return claimed{}, c.unknown("the persistent volume "+claim.Spec.VolumeName+" of "+what, err)
	}
	if pv.Spec.ClaimRef == nil || pv.Spec.ClaimRef.UID != claim.UID {
		return claimed{}, deferral.Errorf(deferral.Busy, "%s and its persistent volume %s do not name each other", what, pv.Name)
	}
	found, err := sourceOfPV(pv)
	if err != nil {
		return claimed{}, deferral.Errorf(deferral.Busy, "the persistent volume %s of %s cannot be told to be a CSI driver's: %w", pv.Name, what, err)
	}
	out := claimed{source: found}
	if owner := metav1.GetControllerOf(claim); owner != nil && owner.Kind == "Pod" {
		out.owner = owner.UID
	}
	return out, nil
}

// unknown is why an object is not known. All of it may pass: a claim may be made,
// and rights to it come a moment after its pod.
func (c *Cluster) unknown(what string, err error) error {
	switch {
	case apierrors.IsNotFound(err):
		return deferral.Errorf(deferral.Busy, "%s does not exist", what)
	case apierrors.IsForbidden(err):
		return deferral.Errorf(deferral.Busy, "%s may not be read by our identity: %w", what, clipped(err))
	case errors.Is(err, context.DeadlineExceeded):
		return deferral.Errorf(deferral.Timeout, "%s is not known: the API server %s did not answer in time", what, c.host())
	default:
		return deferral.Errorf(deferral.Timeout, "%s is not known: %w", what, c.explain(err))
	}
}
