//go:build system

package kube_test

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
)

const (
	fsGroup = int64(2000)
	someone = int64(1000)
	besided = int64(3000) // a supplemental group
)

// withGroup has a pod's containers run as somebody, with a group for its volumes.
func withGroup(p *cluster.Pod, policy corev1.PodFSGroupChangePolicy) *cluster.Pod {
	group, user := fsGroup, someone
	p.Spec.SecurityContext = &corev1.PodSecurityContext{
		FSGroup: &group, RunAsUser: &user, RunAsGroup: &user, FSGroupChangePolicy: &policy, SupplementalGroups: []int64{besided},
	}
	return p
}

// TestGroups has pods with an fsGroup, which the node's kernel cannot give to files of a deferred volume: they have it
// for the same volumes as without crust-proxy. With this policy of the drivers that is one of two.
func TestGroups(t *testing.T) {
	k := cluster.On(t)
	untyped := func(pv *corev1.PersistentVolume) { pv.Spec.CSI.FSType = "" }
	var pods []*cluster.Pod
	for class, driver := range map[string]string{cluster.Crust: cluster.Block, cluster.Runc: cluster.Plain} {
		setDriver(k, driver, `{"fsGroupPolicy": "ReadWriteOnceWithFSType"}`, `{"fsGroupPolicy": "File"}`)
		id := "group-" + strings.TrimSuffix(driver, ".example.com")
		v := k.NewVolume(cluster.VolumeOptions{Name: id, Driver: driver})
		bare := k.NewVolume(cluster.VolumeOptions{Name: "bare-" + id, Driver: driver, Change: untyped})
		p := k.NewPod(id, class).With(v, "/data").With(bare, "/bare")
		pods = append(pods, withGroup(p, corev1.FSGroupChangeAlways).Create())
	}
	for _, p := range pods {
		p.WaitReady()
		wantOut(k, p, "main", "id -u && id -G && stat -c '%g %a' /data /bare", "1000\n1000 2000 3000\n2000 2775\n0 755\n")
		wantOut(k, p, "main", "echo mine > /data/mine && stat -c '%u %g' /data/mine", "1000 2000\n")
		p.AskDelete()
	}
}

// setDriver changes the spec of a CSIDriver until the test has ended.
func setDriver(k *cluster.Kube, driver, spec, before string) {
	k.T.Helper()
	patch(k, "csidriver", driver, spec)
	k.T.Cleanup(func() { patch(k, "csidriver", driver, before) })
}

// patch changes the spec of an object.
func patch(k *cluster.Kube, kind, name, spec string) {
	k.T.Helper()
	_, err := k.Kubectl("patch", kind, name, "--type=merge", "-p", `{"spec": `+spec+`}`)
	k.Must(err)
}
