//go:build system

package kube_test

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// apiServer is the part that is away for longer; the other ones come back at once.
const apiServer = "apiserver"

// away is how long that is, at least.
func away() time.Duration {
	if rig.Soak() {
		return time.Minute
	}
	return 15 * time.Second
}

// chosen are rounds in which every part goes, and in both ways.
var chosen = []string{"kubelet+crust-proxy/kill", "driver+containerd/stop", "apiserver+containerd+crust-proxy/stop"}

// round is parts that go, in this order, and how they go.
type round struct {
	parts []string
	how   string // kill, or stop: SIGTERM
	// step is how far pods have come when the first one goes.
	step step
}

func (r round) String() string { return strings.Join(r.parts, "+") + "/" + r.how }

func (r round) has(part string) bool { return slices.Contains(r.parts, part) }

// rounds are all pairs: killed, and restarted. Which one is first changes. Without a soak they
// are those that are chosen.
func rounds() []round {
	parts := []string{"kubelet", "containerd", "crust-proxy", "driver"}
	var out []round
	for i, one := range parts {
		for _, other := range parts[i+1:] {
			out = append(out, round{parts: []string{one, other}, how: "kill"}, round{parts: []string{other, one}, how: "stop"})
		}
	}
	// That is long: two parts go in it one after the other, each in both ways. A kubelet that was restarted knows of no
	// pod before the API server is back, so it is the last.
	out = append(out, round{parts: []string{"driver", apiServer, "kubelet"}, how: "kill"},
		round{parts: []string{apiServer, "containerd", "crust-proxy"}, how: "stop"})
	for i := range out {
		out[i].step = steps[i%len(steps)]
	}
	return slices.DeleteFunc(out, func(r round) bool { return !rig.Soak() && !slices.Contains(chosen, r.String()) })
}

// step is a point on the way of a pod that comes, or of one that leaves. Once it was reached it stays so.
type step struct {
	name    string
	leaves  bool
	reached func(w *writer) bool
}

// steps are in an order that has each of the pairs begin elsewhere.
var steps = []step{
	{"is asked for", false, func(*writer) bool { return true }},
	{"is asked to go", true, func(*writer) bool { return true }},
	{"is known to kubelet", false, func(w *writer) bool { return exists(cluster.KubeletRoot + "/pods/" + string(w.UID)) }},
	{"has ended", true, func(w *writer) bool { _, err := born(w.pid); return err != nil }},
	{"has its stage on record", false, func(w *writer) bool { return stagedFor(w.on.Volume) }},
	{"has its volume no more on record", true, func(w *writer) bool { return !recorded(w.Target(w.on.Volume)) }},
	{"has its device", false, func(w *writer) bool { return attached(w.on.k, w.on.Volume) }},
	{"has no guard any more", true, func(w *writer) bool { return !guarded(w.Target(w.on.Volume)) }},
	{"has its volume on record", false, func(w *writer) bool { return recorded(w.Target(w.on.Volume)) }},
	{"has its stage no more on record", true, func(w *writer) bool { return !stagedFor(w.on.Volume) }},
	{"has its guard", false, func(w *writer) bool { return guarded(w.Target(w.on.Volume)) }},
}

func exists(path string) bool { _, err := os.Stat(path); return err == nil }

// left is what a pod has on the node.
func (w *writer) left() []string {
	target := w.Target(w.on.Volume)
	var left []string
	for _, one := range []struct {
		what string
		is   bool
	}{
		{"pod", exists(cluster.KubeletRoot + "/pods/" + string(w.UID))}, {stage, stagedFor(w.on.Volume)},
		{device, attached(w.on.k, w.on.Volume)}, {directory, exists(cluster.KubeletRoot + "/plugins/kubernetes.io/csi/" + w.on.Driver + "/" + hashed(w.on.Volume))},
		{"record", recorded(target)}, {"guard", guarded(target)},
	} {
		if one.is {
			left = append(left, one.what)
		}
	}
	return left
}

// found says what a pod has on the node, to be read after a failure.
func (w *writer) found() string { return w.Name + " has [" + strings.Join(w.left(), ", ") + "]" }

func (m *matrix) play(k *cluster.Kube, number int, r round) {
	began := time.Now()
	logf := func(format string, args ...any) {
		k.T.Helper()
		k.T.Logf("%6.2fs "+format, append([]any{time.Since(began).Seconds()}, args...)...)
	}
	leaving, using := m.of(m.generation-1), m.of(m.generation)
	m.generation++
	var coming []*writer
	for _, l := range m.lanes {
		coming = append(coming, l.start(m.k, m.generation))
	}
	leave(k, leaving)
	// One of the two lanes that defer has to come so far.
	watched := map[bool][]*writer{true: leaving, false: coming}[r.step.leaves][number%2]
	soon(k, watched.Name+" "+r.step.name, func() bool { return r.step.reached(watched) })
	pause := time.Duration(m.rand.Int64N(int64(300 * time.Millisecond)))
	time.Sleep(pause)
	logf("pod %s %s; %v later the first part goes", watched.Name, r.step.name, pause)
	f := &faults{k: k, round: r, using: using, rand: m.rand, logf: logf, gone: func() {
		for _, w := range slices.Concat(coming, leaving) {
			logf("%s", w.found())
		}
	}}
	if r.has(apiServer) {
		f.absence()
	} else {
		f.restarts()
	}

	m.haveLeft(k, r, leaving, logf)
	logf("the pods that were to go have gone")
	for _, w := range coming {
		w.settle(k)
	}
	logf("the pods that were to come write")
	for _, w := range using {
		w.unchanged(k, true)
	}
	k.Eventually("all is well again", m.well)
	k.Eventually("the node has what it had before the first fault, and nothing else", func(context.Context) error {
		if diff := cmp.Diff(m.normal, shape(m.k)); diff != "" {
			return errors.New(diff)
		}
		return nil
	})
	logf("the node is as it was")
}
