package pods

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	storagev1 "k8s.io/api/storage/v1"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/decision"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// until repeats try at each change of what is known, for at most Patience, and then returns the last error.
func (c *Cluster) until(ctx context.Context, try func(ctx context.Context) error) error {
	patient, cancel := context.WithTimeout(ctx, c.cfg.Patience)
	defer cancel()
	for {
		changed := c.changes.wait()
		err := try(patient)
		if err == nil {
			return nil
		}
		select {
		case <-changed:
		case <-patient.Done():
			if errors.Is(ctx.Err(), context.Canceled) {
				return volume.Errorf(volume.Canceled, "%w (the caller went away)", err)
			}
			return err
		}
	}
}

func (c *Cluster) byUID(ctx context.Context, uid string) (out decision.Pod, err error) {
	err = c.until(ctx, func(ctx context.Context) (err error) {
		k, there := c.pods.find(uid)
		if !there {
			return c.unknownPod("the pod with uid " + sys.Clip(uid))
		}
		if _, err := c.handler(k.pod); err != nil {
			return err // before the API server is asked for anything
		}
		failed := c.resolver.learn(ctx, k)
		if k, there = c.pods.find(uid); !there {
			return c.unknownPod("the pod with uid " + sys.Clip(uid)) // it went while we asked
		}
		out, err = c.answer(k, failed)
		return err
	})
	return out, err
}

// ByName returns a pod of this node by its namespace/name: of several the newest, but one that is to live before any other.
func (c *Cluster) ByName(ctx context.Context, name string) (decision.Pod, error) {
	found := c.pods.choose(func(k known) bool { return k.pod.String() == name })
	if len(found) == 0 {
		return decision.Pod{}, c.unknownPod("the pod " + sys.Clip(name))
	}
	slices.Reverse(found)
	live := slices.IndexFunc(found, func(k known) bool { return !k.pod.ended && !k.pod.deleted })
	return c.byUID(ctx, found[max(live, 0)].pod.uid)
}

func (c *Cluster) using(ctx context.Context, want source) (out []decision.Pod, err error) {
	tried := make(map[string]error)
	err = c.until(ctx, func(ctx context.Context) error {
		found, err := c.users(ctx, want, tried)
		if err != nil {
			return err
		}
		out = nil
		var problem error
		for _, k := range found {
			pod, err := c.answer(k, nil)
			if err != nil {
				problem = err
				continue
			}
			out = append(out, pod)
		}
		if len(out) == 0 {
			return problem
		}
		return nil
	})
	return out, err
}

// users returns the pods that use a volume. If a live one is known, that is the answer:
// each publish is decided again, for its own pod. Otherwise the claims of all pods with
// unknown volumes are looked up, once per lookup; tried holds the results, by pod uid.
func (c *Cluster) users(ctx context.Context, want source, tried map[string]error) ([]known, error) {
	live := func(k known) bool { return !k.pod.ended && !k.pod.deleted && k.wants(want) }
	if found := c.pods.choose(live); len(found) > 0 {
		return found, nil
	}
	open := c.pods.choose(func(k known) bool {
		_, done := tried[k.pod.uid]
		return !done && k.incomplete()
	})
	slices.Reverse(open) // most likely it is the newest
	for some := range slices.Chunk(open, podsAtOnce) {
		c.learnAll(ctx, some, tried, func() bool { return len(c.pods.choose(live)) > 0 })
		if found := c.pods.choose(live); len(found) > 0 {
			return found, nil
		}
	}
	if found := c.pods.choose(func(k known) bool { return !k.pod.ended && k.wants(want) }); len(found) > 0 {
		return found, nil
	}
	what := "the pod that wants volume " + sys.Clip(want.id) + " of driver " + sys.Clip(want.driver)
	for _, uid := range slices.Sorted(maps.Keys(tried)) {
		if err := tried[uid]; err != nil {
			return nil, volume.Errorf(volume.KindOf(err), "%s is not known; it may be one of those of which a volume is not known: %w", what, err)
		}
	}
	return nil, c.unknownPod(what)
}

// podsAtOnce is for how many pods one lookup gets claims at a time.
const podsAtOnce = 8

// learnAll gets the claims of some pods until enough is known: a pod with a thousand claims
// must not hold up the others.
func (c *Cluster) learnAll(ctx context.Context, some []known, tried map[string]error, enough func() bool) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var parts sync.WaitGroup
	var mu sync.Mutex
	for _, k := range some {
		parts.Go(func() {
			failed := c.resolver.learn(ctx, k)
			if enough() {
				cancel()
			}
			mu.Lock()
			defer mu.Unlock()
			tried[k.pod.uid] = firstError(failed)
		})
	}
	parts.Wait()
}

func (c *Cluster) unknownPod(what string) error {
	if !c.pods.table.current() {
		return c.notReady(what, allPods)
	}
	return volume.Errorf(volume.Busy, "%s is not known on node %s (yet)", what, c.cfg.NodeName)
}

// answer returns the pod as the front needs it. Failed holds the reasons why volumes are not known, by their names.
func (c *Cluster) answer(k known, failed map[string]error) (decision.Pod, error) {
	handler, err := c.handler(k.pod)
	if err != nil {
		return decision.Pod{}, err
	}
	if k.pod.shown.FSGroup != "" && !c.drivers.ready() {
		return decision.Pod{}, c.notReady("pod "+k.pod.String()+": whether its fsGroup is for its volumes", allDrivers)
	}
	out := k.pod.shown
	out.RuntimeHandler = handler
	for _, v := range k.pod.volumes {
		from, done := k.sourceOf(v)
		if done && from.driver == "" {
			continue // not a CSI volume
		}
		shown := v.PodVolume
		shown.Driver, shown.VolumeID, shown.StorageClass = from.driver, from.id, from.class
		shown.FSType, shown.AccessMode, shown.Context = from.fsType, from.mode, from.context
		shown.NoGroup = out.FSGroup != "" && !c.changesGroup(v, from)
		if !done {
			shown.Unknown = failed[v.Name]
			if shown.Unknown == nil {
				shown.Unknown = volume.Errorf(volume.Busy, "the claim %s/%s was not looked at yet", out.Namespace, v.Claim)
			}
		}
		out.Volumes = append(out.Volumes, shown)
	}
	return out, nil
}

// handler returns the pod's runtime handler. An unknown class is an error: after a wrong
// guess the volume would be mounted in the wrong place.
func (c *Cluster) handler(p *pod) (string, error) {
	if p.class == "" {
		return "", nil
	}
	if handler, there := c.classes.get(p.class); there {
		return handler, nil
	}
	if !c.classes.current() {
		return "", c.notReady("pod "+p.String()+": the handler of its runtime class "+p.class, allClasses)
	}
	return "", volume.Errorf(volume.Busy, "pod %s has the runtime class %s, which does not exist: make it, or correct the pod", p, p.class)
}

// notReady is the error of something that is not known although it is watched.
func (c *Cluster) notReady(what, watched string) error {
	if err := c.health.problem(identity, watched); err != nil {
		return volume.Errorf(volume.Timeout, "%s is not known, and %w", what, err)
	}
	return volume.Errorf(volume.Timeout, "%s is not known: the API server %s has not told of %s yet", what, c.server.host(), watched)
}

// changesGroup reports whether kubelet would change the group of a volume's files to the
// pod's fsGroup: the sandbox has to do the same.
func (c *Cluster) changesGroup(v podVolume, from source) bool {
	policy, _ := c.drivers.get(from.driver)
	switch {
	case v.ReadOnly:
		return false
	case policy == string(storagev1.NoneFSGroupPolicy):
		return false
	case policy == string(storagev1.FileFSGroupPolicy):
		return true
	default: // ReadWriteOnceWithFSType, and drivers without a CSIDriver object
		return from.fsType != "" && from.once
	}
}

// Problem is why something cannot be known now, or nil.
func (c *Cluster) Problem() error {
	if err := c.health.problem(identity, allPods, allClasses, allDrivers); err != nil {
		return err
	}
	if !c.pods.table.ready() || !c.classes.ready() || !c.drivers.ready() {
		return volume.Errorf(volume.Timeout, "the API server %s has not told of everything yet", c.server.host())
	}
	return nil
}

// State is the state of the lookup.
type State struct {
	// Synced is true for each kind of objects that is known in full.
	Synced map[string]bool
	// Problems are what is wrong now, each in a sentence.
	Problems []string
	// CSINode is why the CSINode of this node could not be read last, or nil.
	CSINode error
	// LastHeard is when the API server last answered; zero is never.
	LastHeard time.Time
	// Pods counts the known pods, and Incomplete those of them with a volume whose CSI driver is not known yet.
	Pods, Incomplete int
	// Unknown says of some of these pods why.
	Unknown []string
}

// State returns the state of the lookup.
func (c *Cluster) State() State {
	count := len(c.pods.table.values()) // before those that are incomplete, which are some of them
	open := c.pods.choose(known.incomplete)
	problems, last := c.health.state()
	return State{
		Synced: map[string]bool{
			c.pods.table.of.resource: c.pods.table.current(), classKind.resource: c.classes.current(), driverKind.resource: c.drivers.current(),
		},
		Problems: problems, LastHeard: last, CSINode: c.csiNode.problem(ownCSINode),
		Pods: count, Incomplete: len(open), Unknown: c.prefetch.problems(open),
	}
}
