//go:build system

package kube_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
)

// register has the registrars of the two drivers behind crust-proxy go elsewhere, as a
// change of their DaemonSets does.
func register(k *cluster.Kube, registry string) {
	k.T.Helper()
	for _, name := range []string{cluster.Block, cluster.Native} {
		registrar := k.Drivers[name].Registrar
		k.Must(registrar.Stop())
		registrar.Dir = registry
		k.Must(registrar.Start())
	}
}

// past takes the front away under living volumes and has the drivers register with
// kubelet directly. The way back is given, and is gone when the test fails, too.
func past(k *cluster.Kube) (back func()) {
	k.T.Helper()
	const behind, direct = cluster.KubeletRoot + "/crust-proxy/registry", cluster.KubeletRoot + "/plugins_registry"
	normal := k.DefaultProxy()
	off := normal
	off.Front = "{enabled: false, abandonVolumes: true}"
	back = sync.OnceFunc(func() {
		register(k, behind)
		k.Must(k.ConfigureProxy(normal))
		waitKubeletHas(k, true, cluster.Block, cluster.Native)
	})
	k.T.Cleanup(back)
	k.Must(k.ConfigureProxy(off))
	waitKubeletHas(k, false, cluster.Block, cluster.Native)
	register(k, direct)
	waitKubeletHas(k, true, cluster.Block, cluster.Native)
	return back
}

// TestDriversPastTheFrontAndBack: somebody insists that the front goes, and has the
// drivers register with kubelet themselves. Pods keep running and new ones come, until
// all is put back under them.
func TestDriversPastTheFrontAndBack(t *testing.T) {
	k := cluster.On(t)
	lanes := newLanes(k)
	stay := running(k, lanes, 0)
	back := past(k)

	// Without the front these are volumes as any other.
	onHost := running(k, lanes, 1)
	for _, w := range onHost {
		wantOnHost(k, w.Pod, w.on.Volume)
	}
	killSides(k, stay)

	back()
	for _, w := range stay {
		w.unchanged(k, true)
	}
	for _, w := range onHost {
		w.unchanged(k, false)
	}
	k.Eventually("all that was deferred is so still", func(ctx context.Context) error { return well(ctx, stay) })
	for _, pods := range [][]*writer{onHost, stay} {
		leave(k, pods)
		hasLeft(k, pods)
	}
	// What the drivers had mounted by themselves is deferred when it comes anew.
	comeAgain(k, lanes, 4)
}

// comeAgain has pods come to volumes that others have had, and go.
func comeAgain(k *cluster.Kube, lanes []*lane, generation int) {
	k.T.Helper()
	again := running(k, lanes, generation)
	k.Eventually("all is well", func(ctx context.Context) error { return well(ctx, again) })
	for _, w := range again {
		w.keeps(k)
	}
	leave(k, again)
	hasLeft(k, again)
}

// TestPodsDeletedPastTheFront: against all advice pods are deleted while their drivers
// are registered past the front. Kubelet believes that their volumes were unpublished,
// and cannot remove the pods, for the guards are there. When the front is back, and
// kubelet was restarted and so has looked at the disk, all goes its way.
func TestPodsDeletedPastTheFront(t *testing.T) {
	k := cluster.On(t)
	lanes := newLanes(k)[:2] // the volumes of the third are none of ours
	pods := running(k, lanes, 0)
	back := past(k)
	leave(k, pods)
	for _, w := range pods {
		soon(k, "pod "+w.Name+" ends", func() bool { _, err := born(w.pid); return err != nil })
	}
	k.Never("a pod goes without the front", 5*time.Second, func(ctx context.Context) error {
		for _, w := range pods {
			if w.hasGoneButStaged(ctx) == nil {
				return nil
			}
		}
		return errors.New("they all wait")
	})
	back()
	k.Must(k.Kubelet.Restart())
	for _, w := range pods {
		k.Eventually("pod "+w.Name+" has gone", w.hasGoneButStaged)
	}
	comeAgain(k, lanes, 3)
}
