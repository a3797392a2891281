//go:build system

package kube_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
)

// kills is how often crust-proxy is killed in a row.
const kills = 20

// TestProxyKilledAgainAndAgain kills crust-proxy at any moment, while pods come and
// go: each pod finds all that those before it have written to the same volume.
func TestProxyKilledAgainAndAgain(t *testing.T) {
	k := cluster.On(t)
	seed := uint64(time.Now().UnixNano())
	t.Logf("the seed is %d", seed)
	lanes := newLanes(k)
	var stay []*writer
	for _, l := range lanes {
		on := &ledger{k: k, Volume: k.NewVolume(cluster.VolumeOptions{Name: "fault-" + l.name + "-stays", Driver: l.driver})}
		stay = append(stay, newWriter(k, "fault-"+l.name+"-stays", l.class, on))
	}
	for _, w := range stay {
		w.settle(k)
	}
	stop, killed := make(chan struct{}), make(chan struct{})
	defer func() { close(stop); <-killed }()
	go func() { defer close(killed); killAgainAndAgain(k, rand.New(rand.NewPCG(seed, 0)), stop) }()

	generations := churn(k, lanes, killed)
	t.Logf("%d pods came and went", generations*len(lanes))
	for _, w := range stay {
		w.unchanged(k, false)
	}
	k.Eventually("all is well again", func(ctx context.Context) error { return well(ctx, stay) })
}

// killAgainAndAgain has crust-proxy serve for some time before each kill, but for some
// times when it dies as it starts.
func killAgainAndAgain(k *cluster.Kube, random *rand.Rand, stop <-chan struct{}) {
	for i := range kills {
		lives, what := time.Duration(random.Int64N(int64(3*time.Second))), "serves"
		if i%4 == 3 {
			lives, what = lives/20, "was started"
		} else if err := k.Proxy.WaitReady(); err != nil {
			k.T.Error(err)
			return
		}
		select {
		case <-stop:
			return
		case <-time.After(lives):
		}
		k.Proxy.Kill()
		k.T.Logf("kill %d, %v after it %s", i+1, lives, what)
		if err := k.Proxy.Launch(); err != nil {
			k.T.Error(err)
			return
		}
	}
	if err := k.Proxy.WaitReady(); err != nil {
		k.T.Error(err)
	}
}

// churn has pods come to one volume of each lane while others leave the one before,
// until the kills are over, and for a round more. No pod is left.
func churn(k *cluster.Kube, lanes []*lane, killed <-chan struct{}) int {
	k.T.Helper()
	generation := 0
	for over := false; !over; generation++ {
		select {
		case <-killed:
			over = true
		default:
		}
		var coming, leaving []*writer
		for _, l := range lanes {
			if generation > 0 {
				leaving = append(leaving, l.of(generation-1))
			}
			coming = append(coming, l.start(k, generation))
		}
		leave(k, leaving)
		for _, w := range coming {
			w.settle(k)
			w.keeps(k)
		}
		hasLeft(k, leaving)
	}
	for _, l := range lanes {
		leave(k, []*writer{l.of(generation - 1)})
		hasLeft(k, []*writer{l.of(generation - 1)})
	}
	return generation
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
