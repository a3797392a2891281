package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
	"github.com/crust-proxy/crust-proxy/test/rig/csivolume"
)

// A node that is as full as Kubernetes lets it be and a bit more: 110 pods is the
// default, 250 what large nodes are set to.
const (
	podsOfNode   = 250
	volumesOfPod = 4
	nodeName     = "node-1"
)

// inCluster measures the daemon's memory with the look-up of pods on: a real API server, kubelet's identity, and
// volumes that come through the front, as kubelet brings them.
func inCluster(r *testbed) {
	plane := cluster.StartControlPlane(r.t)
	r.must(plane.Apply(clusterObjects))
	r.daemon.Extra = fmt.Sprintf("front: {enabled: true}\ncluster: {kubeconfig: %q, nodeName: %s}\n"+
		"policy: {rules: [{name: pods, runtimeHandlers: [kata], defer: true}]}\n", plane.NodeKubeconfig(nodeName), nodeName)
	r.daemon.Start()
	settled(r, 0)
	r.sheet.mib("resident memory with the look-up of pods on, idle", "<= 45 MiB", r.memory(), 45)
	count := r.set.scale(podsOfNode)
	pods := createPods(r, plane, count)
	what := fmt.Sprintf("the same with %d pods and %d deferred volumes", count, count*volumesOfPod)
	driver := csivolume.NewClient(startDriver(r, r.daemon.Images), driverName, r.daemon.Kubelet)
	for _, pod := range pods {
		for _, name := range pod.volumes {
			r.sparse(filepath.Join(r.daemon.Images, name))
			v := driver.Volume(r.t, name, "ext4")
			v.ID = name
			v.For(pod.uid)
			v.Publish()
		}
	}
	records := check.Value(os.ReadDir(r.daemon.Dir + "/run/state/volumes"))(r.t)
	check.Require(r.t, len(records) == count*volumesOfPod, "%d volumes are deferred and not %d", len(records), count*volumesOfPod)
	settled(r, count)
	r.sheet.mib(what, "<= 80 MiB", r.memory(), 80)
	r.daemon.Stop()
	r.daemon.Start()
	settled(r, count)
	r.sheet.mib(what+", after a restart", "<= 80 MiB", r.memory(), 80)
}

// settled waits until the daemon knows so many pods and all their volumes, and until what it did for that is over.
func settled(r *testbed, pods int) {
	want := []string{
		fmt.Sprintf("\ncrust_proxy_cluster_pods %d\n", pods), "\ncrust_proxy_cluster_pods_incomplete 0\n", "\ncrust_proxy_source_synced{source=\"pods\"} 1\n",
	}
	check.Eventually(r.t, "the daemon knows the pods", func() bool {
		r.must(r.ctx.Err())
		metrics := r.http("/metrics")
		return !slices.ContainsFunc(want, func(line string) bool { return !strings.Contains(metrics, line) })
	})
	time.Sleep(2 * time.Second)
}
