//go:build system

package kube_test

import (
	"context"
	"testing"

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

// TestDriversPastTheFrontAndBack: somebody insists that the front goes, and has the
// drivers register with kubelet themselves. Pods keep running and new ones come, until
// all is put back under them.
func TestDriversPastTheFrontAndBack(t *testing.T) {
	const behind, direct = cluster.KubeletRoot + "/crust-proxy/registry", cluster.KubeletRoot + "/plugins_registry"
	k := cluster.On(t)
	lanes := newLanes(k)
	stay := running(k, lanes, 0)
	t.Cleanup(func() {
		if k.Drivers[cluster.Block].Registrar.Dir != behind {
			register(k, behind)
		}
	})
	normal := k.DefaultProxy()
	off := normal
	off.Front = "{enabled: false, abandonVolumes: true}"
	k.Must(k.ConfigureProxy(off))
	waitKubeletHas(k, false, cluster.Block, cluster.Native)
	register(k, direct)
	waitKubeletHas(k, true, cluster.Block, cluster.Native)

	// Without the front these are volumes as any other.
	onHost := running(k, lanes, 1)
	for _, w := range onHost {
		wantOnHost(k, w.Pod, w.on.Volume)
	}
	killSides(k, stay)

	register(k, behind)
	k.Must(k.ConfigureProxy(normal))
	waitKubeletHas(k, true, cluster.Block, cluster.Native)
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
	again := running(k, lanes, 4)
	k.Eventually("all is well", func(ctx context.Context) error { return well(ctx, again) })
	for _, w := range again {
		w.keeps(k)
	}
	leave(k, again)
	hasLeft(k, again)
}
