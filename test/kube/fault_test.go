//go:build system

package kube_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// lane is one way to have a volume. Its three volumes take turns: while a pod comes
// to the first, one is using the second, and one leaves the third.
type lane struct {
	name, driver, class string
	ledgers             [3]*ledger
	pods                [3]*writer // nil where a volume has none
}

// newLanes are the ways: each kind of driver for pods whose volumes are deferred, and
// a pod beside them whose volume is not.
func newLanes(k *cluster.Kube) []*lane {
	k.T.Helper()
	lanes := []*lane{
		{name: "block", driver: cluster.Block, class: cluster.Crust},
		{name: "native", driver: cluster.Native, class: cluster.Crust},
		{name: "plain", driver: cluster.Block, class: cluster.Runc},
	}
	for _, l := range lanes {
		for i := range l.ledgers {
			l.ledgers[i] = &ledger{k: k, Volume: k.NewVolume(cluster.VolumeOptions{
				Name: fmt.Sprintf("fault-%s-volume-%d", l.name, i), Driver: l.driver, Size: 32 * cluster.Mib,
			})}
		}
	}
	return lanes
}

func (l *lane) of(generation int) *writer { return l.pods[generation%len(l.pods)] }

// start makes a pod for one of the volumes, and waits for nothing.
func (l *lane) start(k *cluster.Kube, generation int) *writer {
	k.T.Helper()
	at := generation % len(l.ledgers)
	l.pods[at] = newWriter(k, fmt.Sprintf("fault-%s-%d", l.name, generation), l.class, l.ledgers[at])
	return l.pods[at]
}

// matrix is the node on which everything goes wrong, two parts at a time.
type matrix struct {
	k     *cluster.Kube
	lanes []*lane
	// generation is that of the youngest pods.
	generation int
	// normal is what the node has on it while two generations run.
	normal []string
	rand   *rand.Rand
}

// newMatrix has two generations of pods running, without any fault so far.
func newMatrix(k *cluster.Kube, seed uint64) *matrix {
	m := &matrix{k: k, rand: rand.New(rand.NewPCG(seed, 0)), generation: 1, lanes: newLanes(k)}
	for _, l := range m.lanes {
		l.start(k, 0)
		l.start(k, 1)
	}
	for _, w := range m.running() {
		w.settle(k)
	}
	k.Eventually("all is well before the first fault", m.well)
	m.normal = shape(k)
	return m
}

// of are the pods of a generation, of all lanes.
func (m *matrix) of(generation int) []*writer {
	var out []*writer
	for _, l := range m.lanes {
		out = append(out, l.of(generation))
	}
	return out
}

func (m *matrix) running() []*writer { return append(m.of(m.generation), m.of(m.generation-1)...) }

// well wants every volume on record as it should be, and stats of it.
func (m *matrix) well(ctx context.Context) error { return well(ctx, m.running()) }

func well(ctx context.Context, running []*writer) error {
	deferred := slices.DeleteFunc(slices.Clone(running), func(w *writer) bool { return w.Spec.RuntimeClassName == nil })
	if err := allBound(ctx, deferred); err != nil {
		return err
	}
	for _, w := range deferred {
		if err := statsNow(ctx, w); err != nil {
			return err
		}
	}
	return nil
}

// TestFaults takes two parts of the node away at once, while pods come to their volumes, use
// them, and leave them. Each round has pods in all three phases: who comes in one round uses
// its volume in the next, and leaves in the one after. A soak has every two parts.
func TestFaults(t *testing.T) {
	k := cluster.On(t)
	m := newMatrix(k, rig.Seed(t))
	for i, r := range rounds() {
		t.Run(r.String(), func(t *testing.T) { m.play(k.For(t), i, r) })
		check.Require(t, !t.Failed(), "the rounds that follow would find what this one has left")
	}
	leave(k, m.of(m.generation-1))
	hasLeft(k, m.of(m.generation-1))
	// Stats as kubelet tells them, of pods that came in the midst of faults.
	for _, w := range m.of(m.generation) {
		w.WaitStats(w.on.Volume, "/data")
	}
	leave(k, m.of(m.generation))
	hasLeft(k, m.of(m.generation))
	comeAgain(k, m.lanes) // with what all before have written
}

// leave asks pods to go, and notes down what they have promised.
func leave(k *cluster.Kube, pods []*writer) {
	k.T.Helper()
	for _, w := range pods {
		k.Eventually(fmt.Sprintf("pod %s tells what it has written", w.Name), func(context.Context) error { return w.wrote(0) })
		w.AskDelete()
	}
}

// hasLeft waits until pods have gone, with everything.
func hasLeft(k *cluster.Kube, pods []*writer) {
	k.T.Helper()
	for _, w := range pods {
		k.Eventually("pod "+w.Name+" has gone, and its volume was given back", w.hasGone)
	}
}

// comeAgain has pods come to all volumes that others have had, and go.
func comeAgain(k *cluster.Kube, lanes []*lane) {
	k.T.Helper()
	var again []*writer
	for _, l := range lanes {
		for i := range l.ledgers {
			again = append(again, l.start(k, len(l.ledgers)*100+i))
		}
	}
	for _, w := range again {
		w.settle(k)
		w.keeps(k)
	}
	k.Eventually("all is well", func(ctx context.Context) error { return well(ctx, again) })
	leave(k, again)
	hasLeft(k, again)
}

// forgetTime is how long a volume has to be staged for nobody before we take it that
// kubelet does not know of it. It tries more often than that.
const forgetTime = 20 * time.Second

// haveLeft waits until the pods have gone with all that they had.
//
// Kubelet itself forgets a volume where it ends after the last unpublish and before
// it has removed the staging directory: when it starts it looks for volumes in the
// directories of pods, and there is none any more. That is so with every driver. Such a
// volume is given back, or its empty directory is removed where the unstage was served,
// when the next pod that has it goes.
func (m *matrix) haveLeft(k *cluster.Kube, r round, leaving []*writer, logf func(string, ...any)) {
	k.T.Helper()
	if !r.has("kubelet") {
		hasLeft(k, leaving)
		return
	}
	for _, w := range leaving {
		// The volume may stay staged.
		k.Eventually("pod "+w.Name+" has gone", func(ctx context.Context) error { return w.hasGoneBut(ctx, stage, device, directory) })
	}
	var staged []*writer
	for end := time.Now().Add(forgetTime); ; time.Sleep(100 * time.Millisecond) {
		staged = nil
		for _, w := range leaving {
			if w.hasGone(k.T.Context()) != nil {
				staged = append(staged, w)
			}
		}
		if len(staged) == 0 || time.Now().After(end) {
			break
		}
	}
	for _, w := range staged {
		logf("kubelet has forgotten the volume of pod %s: a pod comes and goes", w.Name)
		visitor := newWriter(m.k, w.Name+"-visitor", w.class(), w.on)
		visitor.settle(k)
		visitor.keeps(k)
		leave(k, []*writer{visitor})
		hasLeft(k, []*writer{visitor})
	}
}

// class is the pod's runtime class.
func (w *writer) class() string {
	if w.Spec.RuntimeClassName == nil {
		return cluster.Runc
	}
	return *w.Spec.RuntimeClassName
}

// What a volume that was staged has on the node.
const (
	stage     = "stage"
	device    = "device"
	directory = "staging directory"
)
