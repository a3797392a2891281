//go:build system

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
)

// A node that is as full as Kubernetes lets it be and a bit more: 110 pods is the
// default, 250 what large nodes are set to.
const (
	podsOfNode   = 250
	volumesOfPod = 4
	nodeName     = "node-1"
)

// inCluster measures the daemon's memory with the look-up of pods on: a real API
// server, kubelet's identity, and volumes that come through the front, as kubelet
// brings them.
func inCluster(ctx context.Context, set settings, r *testbed, s *sheet) (err error) {
	plane, err := cluster.OpenControlPlane(r.dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, plane.Close()) }()
	access, err := plane.NodeKubeconfig(nodeName)
	if err != nil {
		return err
	}
	if err := plane.Apply(clusterObjects); err != nil {
		return err
	}
	r.front = true
	r.more = fmt.Sprintf("cluster: {kubeconfig: %q, nodeName: %s}\npolicy: {rules: [{name: pods, runtimeHandlers: [kata], defer: true}]}\n", access, nodeName)
	if _, err := r.start(); err != nil {
		return err
	}
	if err := r.settled(ctx, 0); err != nil {
		return err
	}
	idle, err := r.memory()
	if err != nil {
		return err
	}
	s.memory("resident memory with the look-up of pods on, idle", "<= 45 MiB", idle, 45)
	count := set.scale(podsOfNode)
	pods, err := createPods(ctx, plane, count)
	if err != nil {
		return err
	}
	what := fmt.Sprintf("the same with %d pods and %d deferred volumes", count, count*volumesOfPod)
	if err := r.publishAll(ctx, pods); err != nil {
		return err
	}
	records, err := os.ReadDir(r.dir + "/run/state/volumes")
	if err != nil {
		return err
	}
	if len(records) != count*volumesOfPod {
		return fmt.Errorf("%d volumes are deferred and not %d", len(records), count*volumesOfPod)
	}
	if err := r.settled(ctx, count); err != nil {
		return err
	}
	full, err := r.memory()
	if err != nil {
		return err
	}
	s.memory(what, "<= 80 MiB", full, 80)
	r.stop()
	if _, err := r.start(); err != nil {
		return err
	}
	if err := r.settled(ctx, count); err != nil {
		return err
	}
	again, err := r.memory()
	if err != nil {
		return err
	}
	s.memory(what+", after a restart", "<= 80 MiB", again, 80)
	return nil
}

// settled waits until the daemon knows so many pods and all their volumes, and
// until what it did for that is over.
func (r *testbed) settled(ctx context.Context, pods int) error {
	want := []string{
		fmt.Sprintf("\ncrust_proxy_cluster_pods %d\n", pods), "\ncrust_proxy_cluster_pods_incomplete 0\n", "\ncrust_proxy_source_synced{source=\"pods\"} 1\n",
	}
	for start := time.Now(); time.Since(start) < time.Minute; time.Sleep(50 * time.Millisecond) {
		metrics, err := r.get("/metrics")
		if err != nil {
			return err
		}
		missing := false
		for _, line := range want {
			missing = missing || !strings.Contains(metrics, line)
		}
		if missing {
			continue
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(2 * time.Second):
			return nil
		}
	}
	return errors.New("the daemon does not come to know the pods")
}

// publishAll does for every volume of every pod what kubelet does.
func (r *testbed) publishAll(ctx context.Context, pods []podOfNode) error {
	registry := r.kubelet + "/crust-proxy/registry"
	if err := os.MkdirAll(registry, 0o700); err != nil {
		return err
	}
	through := r.dir + "/run/csi/" + driverName + ".sock"
	if err := r.spawn(through, roleDefers, r.dir+"/csi.sock", registry+"/"+driverName+"-reg.sock", r.images); err != nil {
		return err
	}
	conn, err := r.dial(through)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	client := csi.NewNodeClient(conn)
	for _, pod := range pods {
		for _, name := range pod.volumes {
			if err := r.publish(ctx, client, pod.uid, name); err != nil {
				return err
			}
		}
	}
	return nil
}

func (r *testbed) publish(ctx context.Context, client csi.NodeClient, uid, name string) error {
	image := filepath.Join(r.images, name)
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		return err
	}
	if err := os.Truncate(image, 1<<30); err != nil {
		return err
	}
	staging := filepath.Join(r.kubelet, "plugins/kubernetes.io/csi", driverName, name, "globalmount")
	dir := filepath.Join(r.kubelet, "pods", uid, "volumes/kubernetes.io~csi", name)
	for _, one := range []string{staging, dir} {
		if err := os.MkdirAll(one, 0o750); err != nil {
			return err
		}
	}
	data := fmt.Sprintf(`{"driverName":%q,"volumeHandle":%q}`, driverName, name)
	if err := os.WriteFile(filepath.Join(dir, "vol_data.json"), []byte(data), 0o600); err != nil {
		return err
	}
	capability := &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: "ext4"}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
	}
	_, err := client.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: name, StagingTargetPath: staging, VolumeCapability: capability})
	if err != nil {
		return fmt.Errorf("stage %s: %w", name, err)
	}
	_, err = client.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId: name, StagingTargetPath: staging, TargetPath: dir + "/mount", VolumeCapability: capability,
		VolumeContext: map[string]string{"csi.storage.k8s.io/pod.uid": uid},
	})
	if err != nil {
		return fmt.Errorf("publish %s: %w", name, err)
	}
	return nil
}
