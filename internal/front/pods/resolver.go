package pods

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sync/singleflight"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/client-go/util/flowcontrol"
	translation "k8s.io/csi-translation-lib"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

const (
	// atOnce bounds for how many volumes of one pod claims are requested at a time.
	atOnce = 4
	// getsAtOnce bounds the claims that are requested at a time, for all pods.
	getsAtOnce = 16
	// A claim that does not exist, or is not bound, is requested again after such a time.
	missingFirst = 250 * time.Millisecond
	missingLast  = 30 * time.Second
	// maxMissing is after how many unknown claims a pod's other claims are not requested: kubelet starts no pod
	// with a missing claim, and a pod's author can name any number that do not exist.
	maxMissing = 4
)

// resolver learns the sources of pods' volumes from their claims.
type resolver struct {
	pods    *pods
	server  *server
	gets    singleflight.Group
	slots   chan struct{} // one for each claim that is being requested
	missing retries       // of claims that did not exist, or were not bound
}

// learn requests the unknown sources of a pod's volumes, and records them. It returns the
// errors by volume name. It stops when ctx ends, and after several unknown claims.
func (r *resolver) learn(ctx context.Context, k known) map[string]error {
	var mu sync.Mutex
	failed := make(map[string]error)
	sys.Each(atOnce, slices.All(k.unlearned()), func(_ int, v podVolume) {
		mu.Lock()
		enough := len(failed) >= maxMissing
		mu.Unlock()
		if enough || ctx.Err() != nil {
			return
		}
		if err := r.learnOne(ctx, k.pod, v); err != nil {
			mu.Lock()
			failed[v.Name] = err
			mu.Unlock()
		}
	})
	return failed
}

// learnOne requests the source of a pod's volume, and records it.
func (r *resolver) learnOne(ctx context.Context, p *pod, v podVolume) error {
	if err := r.pods.problem(); err != nil {
		return volume.Errorf(volume.Timeout, "the claim %s/%s of pod %s is not known, and %w", p.shown.Namespace, v.Claim, p, err)
	}
	found, err := r.claim(ctx, p, v)
	if err != nil {
		return err
	}
	return r.record(p, v, found)
}

// record records the source of a pod's volume, unless its claim is not the pod's.
func (r *resolver) record(p *pod, v podVolume, found source) error {
	if v.own && found.owner != p.uid {
		return volume.Errorf(volume.Busy, "the claim %s/%s was not made for the pod's own volume %s: delete the claim, "+
			"or name the pod otherwise", p.shown.Namespace, v.Claim, v.Name)
	}
	r.pods.learn(p.uid, v.Name, found)
	return nil
}

// claim gets the claim of a pod's volume, and its persistent volume. Concurrent callers share a request; each
// waits until its own ctx ends. A request ends when its answer is on record, for callers with an older pod.
func (r *resolver) claim(ctx context.Context, p *pod, v podVolume) (source, error) {
	key := p.shown.Namespace + "/" + v.Claim
	shared := r.gets.DoChan(key, func() (any, error) {
		now, _ := r.pods.table.get(p.uid)
		if found, done := now.sourceOf(v); done {
			return found, nil
		}
		if err := r.missing.recentError(key); err != nil {
			return source{}, err
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), getTime)
		defer cancel()
		select {
		case r.slots <- struct{}{}:
			defer func() { <-r.slots }()
		case <-ctx.Done():
			return source{}, volume.Errorf(volume.Timeout, "the claim %s is not known: %d others are being asked for", key, getsAtOnce)
		}
		found, err := r.getClaim(ctx, p.shown.Namespace, v.Claim)
		if volume.KindOf(err) == volume.Timeout { // which says nothing about the claim
			r.missing.note(key, nil)
		} else {
			r.missing.note(key, err)
		}
		if err == nil {
			_ = r.record(p, v, found) // each caller gets that error by itself
		}
		return found, err
	})
	select {
	case done := <-shared:
		found, _ := done.Val.(source)
		return found, done.Err
	case <-ctx.Done():
		return source{}, volume.Errorf(volume.Timeout, "the claim %s is not known: the API server %s did not answer in time: %w",
			key, r.server.host(), ctx.Err())
	}
}

func (r *resolver) getClaim(ctx context.Context, namespace, name string) (source, error) {
	what := "the claim " + namespace + "/" + name
	claim, pv := &corev1.PersistentVolumeClaim{}, &corev1.PersistentVolume{}
	if err := r.server.get(ctx, what, coreGroup, "persistentvolumeclaims", namespace, name, claim); err != nil {
		return source{}, err
	}
	if claim.Status.Phase != corev1.ClaimBound || claim.Spec.VolumeName == "" {
		return source{}, volume.Errorf(volume.Busy, "%s is not bound to a volume yet", what)
	}
	name = claim.Spec.VolumeName
	if err := r.server.get(ctx, "the persistent volume "+name+" of "+what, coreGroup, "persistentvolumes", "", name, pv); err != nil {
		return source{}, err
	}
	if pv.Spec.ClaimRef == nil || pv.Spec.ClaimRef.UID != claim.UID {
		return source{}, volume.Errorf(volume.Busy, "%s and its persistent volume %s do not name each other", what, pv.Name)
	}
	found, err := sourceOfPV(pv)
	if err != nil {
		return source{}, volume.Errorf(volume.Busy, "the persistent volume %s of %s cannot be told to be a CSI driver's: %w", pv.Name, what, err)
	}
	if owner := metav1.GetControllerOf(claim); owner != nil && owner.Kind == "Pod" {
		found.owner = string(owner.UID)
	}
	return found, nil
}

// retries remembers what could not be learned, and delays the next attempt. The delay doubles with each
// attempt. What is not attempted again for twice the last delay is forgotten.
type retries struct {
	delays *flowcontrol.Backoff
	errors *cache.Expiring // until the next attempt is due
}

func newRetries(first, last time.Duration) retries {
	return retries{delays: flowcontrol.NewBackOff(first, last), errors: cache.NewExpiring()}
}

// recentError returns the error of the last attempt while the next one is not due, else nil.
func (r *retries) recentError(key string) error {
	known, _ := r.errors.Get(key)
	err, _ := known.(error)
	return err
}

// note records the outcome of an attempt. A success is forgotten.
func (r *retries) note(key string, err error) {
	r.delays.GC()
	if err == nil {
		r.delays.Reset(key)
		r.errors.Delete(key)
		return
	}
	r.delays.Next(key, time.Now())
	r.errors.Set(key, err, r.delays.Get(key))
}

// Prefetching is slow: when a daemon is updated on every node at once, the API server must
// not feel it. A lookup does not wait for it.
const (
	prefetchAtOnce = 4
	prefetchRate   = 5 // pods a second
	prefetchBurst  = 4
	prefetchSpread = 10 * time.Second // of the starts of all nodes' daemons
	// A claim that is not bound may never be bound.
	prefetchFirst = time.Second
	prefetchLast  = 5 * time.Minute
	prefetchSlow  = 8 * time.Second // the delay from which on it is a finding
)

// prefetcher learns the sources of new pods' volumes before they are looked up, so that they
// are known when the API server is away.
type prefetcher struct {
	pods     *pods
	resolver *resolver
	rate     flowcontrol.RateLimiter
	spread   time.Duration
	tried    retries // by the pod's uid
}

// run learns until ctx ends.
func (p *prefetcher) run(ctx context.Context) {
	sys.Sleep(ctx, rand.N(p.spread+1)) // #nosec G404 -- no secret
	for ctx.Err() == nil {
		changed := p.pods.table.changes.wait()
		again := time.NewTimer(p.round(ctx))
		select {
		case <-ctx.Done():
		case <-changed:
		case <-again.C:
		}
		again.Stop()
	}
}

// round tries all pods that are due, and returns the time until the next round. It begins
// with the newest pod, which is being started.
func (p *prefetcher) round(ctx context.Context) time.Duration {
	if p.pods.problem() != nil {
		return prefetchFirst // the API server is away
	}
	open := p.pods.choose(known.incomplete)
	if len(open) == 0 {
		return prefetchLast
	}
	sys.Each(prefetchAtOnce, slices.Backward(open), func(_ int, k known) {
		if p.tried.recentError(k.pod.uid) == nil && p.rate.Wait(ctx) == nil {
			p.tried.note(k.pod.uid, firstError(p.resolver.learn(ctx, k)))
		}
	})
	return prefetchFirst
}

// problems says of the first of some incomplete pods why a volume of them is not known although it was asked for several times.
func (p *prefetcher) problems(open []known) (out []string) {
	for _, k := range open {
		if err := p.tried.recentError(k.pod.uid); err != nil && p.tried.delays.Get(k.pod.uid) >= prefetchSlow && len(out) < 3 {
			out = append(out, fmt.Sprintf("pod %s: %v", k.pod, err))
		}
	}
	return out
}

func firstError(failed map[string]error) error {
	if len(failed) == 0 {
		return nil
	}
	return failed[slices.Min(slices.Collect(maps.Keys(failed)))]
}

// inTree translates Kubernetes' former in-tree volumes to the CSI driver and volume id by which kubelet asks for them.
var inTree = translation.New()

// inTreeInline returns the CSI volume of an inline in-tree volume, or the zero source.
func inTreeInline(api *corev1.Volume, namespace string) source {
	if !inTree.IsInlineMigratable(api) {
		return source{}
	}
	pv, err := translated(func() (*corev1.PersistentVolume, error) {
		return inTree.TranslateInTreeInlineVolumeToCSI(logr.Discard(), api, namespace)
	})
	if err != nil {
		return source{} // kubelet cannot mount it either
	}
	return sourceOf(pv)
}

// sourceOfPV returns the CSI volume of a persistent volume, or the zero source.
func sourceOfPV(pv *corev1.PersistentVolume) (source, error) {
	if pv.Spec.CSI == nil && inTree.IsPVMigratable(pv) {
		migrated, err := translated(func() (*corev1.PersistentVolume, error) { return inTree.TranslateInTreePVToCSI(logr.Discard(), pv) })
		if err != nil {
			return source{}, err
		}
		pv = migrated
	}
	return sourceOf(pv), nil
}

// translated is what the library makes of a volume whose fields anyone may have written. It panics over some,
// and one pod must not end the daemon at each start.
func translated(translate func() (*corev1.PersistentVolume, error)) (pv *corev1.PersistentVolume, err error) {
	defer func() {
		if reason := recover(); reason != nil {
			err = fmt.Errorf("it cannot be translated: %v", reason)
		}
	}()
	return translate()
}

func sourceOf(pv *corev1.PersistentVolume) source {
	if pv.Spec.CSI == nil {
		return source{}
	}
	return source{
		mode: string(append(slices.Clone(pv.Spec.AccessModes), "")[0]), context: deciding(pv.Spec.CSI.VolumeAttributes),
		driver: pv.Spec.CSI.Driver, id: pv.Spec.CSI.VolumeHandle, fsType: pv.Spec.CSI.FSType,
		class: cmp.Or(pv.Annotations[corev1.BetaStorageClassAnnotation], pv.Spec.StorageClassName),
		once: slices.ContainsFunc(pv.Spec.AccessModes, func(mode corev1.PersistentVolumeAccessMode) bool {
			return mode == corev1.ReadWriteOnce || mode == corev1.ReadWriteOncePod
		}),
	}
}
