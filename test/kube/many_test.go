//go:build system

package kube_test

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
)

// manyPods come and go together, each with a volume of its own.
const manyPods = 60

// TestManyPodsAtOnce has a node's worth of pods come at once and go at once: every
// one of them has its own volume, with the data that it has put there.
func TestManyPodsAtOnce(t *testing.T) {
	k := cluster.On(t)
	var wanted []cluster.VolumeOptions
	for n := range manyPods {
		driver := []string{cluster.Block, cluster.Native}[n%2]
		wanted = append(wanted, cluster.VolumeOptions{Name: fmt.Sprintf("v%d", n), Driver: driver})
	}
	volumes := k.NewVolumes(wanted...)
	writers := k.NewCrowd("writer", cluster.Crust, volumes)
	for i, p := range writers.Pods {
		p.Script("echo " + volumes[i].Name + " > /data/name && sync && " + cluster.Forever)
	}
	startAll(k, writers)
	for i, p := range writers.Pods {
		waitOut(k, p, "main", "cat /data/name && grep -c ' /data ext4 ' /proc/mounts", volumes[i].Name+"\n1\n")
	}
	all, err := listed(k, "--state", "bound")
	k.Must(err)
	if len(all) != manyPods {
		t.Errorf("crustctl lists %d volumes that sandboxes have", len(all))
	}
	endAll(k, writers)

	// Some of the volumes again, which are on other devices now.
	some := slices.DeleteFunc(slices.Clone(volumes), func(v *cluster.Volume) bool { return v.Name[len(v.Name)-1] != '7' })
	slices.Reverse(some)
	readers := k.NewCrowd("reader", cluster.Crust, some)
	startAll(k, readers)
	for i, p := range readers.Pods {
		wantOut(k, p, "main", "cat /data/name", some[i].Name+"\n")
	}
	endAll(k, readers)
	k.Must(k.WantNothingLeft())
}

func startAll(k *cluster.Kube, crowd *cluster.Crowd) {
	k.T.Helper()
	ctx, cancel := context.WithTimeout(k.T.Context(), 2*cluster.Patience)
	defer cancel()
	k.Must(crowd.Start(ctx))
}

func endAll(k *cluster.Kube, crowd *cluster.Crowd) {
	k.T.Helper()
	ctx, cancel := context.WithTimeout(k.T.Context(), 2*cluster.Patience)
	defer cancel()
	k.Must(crowd.End(ctx))
}
