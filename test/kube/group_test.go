//go:build system

package kube_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

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

// TestGroups is about fsGroup, whose files the node's kernel cannot see.
func TestGroups(t *testing.T) {
	k := cluster.On(t)
	inEachWay(k, t, "change policies", changePolicies)
	// A driver's own word is asked for one kind of CSIDriver after the other.
	t.Run("driver policies", func(t *testing.T) {
		for _, policy := range []storagev1.FSGroupPolicy{
			storagev1.NoneFSGroupPolicy, storagev1.ReadWriteOnceWithFSTypeFSGroupPolicy, storagev1.FileFSGroupPolicy,
		} {
			k := k.For(t)
			for _, driver := range []string{cluster.Block, cluster.Plain} {
				setGroupPolicy(k, driver, policy)
			}
			t.Run(string(policy), func(t *testing.T) { driverPolicies(k.For(t), policy) })
		}
	})
}

// files are many, made by a root that knows no group.
const makeFiles = `mkdir -p /data/many && cd /data/many && for i in $(seq 200); do echo $i > $i; done && chmod 600 * && sync`

// wrongFiles counts those that the group has not.
const wrongFiles = `find /data/many -not -group 2000 | wc -l`

// changePolicies takes one volume through pods with and without a group.
func changePolicies(k *cluster.Kube, way, driver string) {
	v := k.NewVolume(cluster.VolumeOptions{Name: "group-" + way, Driver: driver})
	next := func(name string) *cluster.Pod { return k.NewPod(name+"-"+way, cluster.Crust).With(v, "/data") }
	root := next("root").Start()
	root.Exec(makeFiles)
	root.Delete()

	// The root has another group: everything is changed, whatever the policy.
	first := withGroup(next("first"), corev1.FSGroupChangeOnRootMismatch).Start()
	wantOut(k, first, "main", "id -u && id -G && stat -c '%g %a' /data && "+wrongFiles, "1000\n1000 2000 3000\n2000 2775\n0\n")
	wantOut(k, first, "main", "echo mine > /data/many/mine && echo more >> /data/many/7 && stat -c '%u %g' /data/many/mine", "1000 2000\n")
	first.Delete()

	// The root is right: the rest is not walked.
	root = next("again").Start()
	root.Exec("chgrp 0 /data/many/1* && sync")
	root.Delete()
	second := withGroup(next("second"), corev1.FSGroupChangeOnRootMismatch).Start()
	wantOut(k, second, "main", "stat -c '%g %a' /data && "+wrongFiles, "2000 2775\n111\n")
	if out, err := second.TryExec("main", "echo x >> /data/many/100"); err == nil || !strings.Contains(err.Error(), "Permission denied") {
		k.T.Errorf("a file of root's can be written: %q, %v", out, err)
	}
	second.Delete()

	third := withGroup(next("third"), corev1.FSGroupChangeAlways).Start()
	wantOut(k, third, "main", wrongFiles+" && echo x >> /data/many/100 && cat /data/many/mine", "0\nmine\n")
	third.Delete()

	// Who only has it among the supplemental groups changes nothing.
	fourth := next("fourth")
	fourth.Spec.SecurityContext = &corev1.PodSecurityContext{SupplementalGroups: []int64{fsGroup}}
	fourth.Start()
	wantOut(k, fourth, "main", "echo root > /data/many/root && chgrp 0 /data/many/1 && id -G", "0 2000\n")
	wantOut(k, fourth, "main", wrongFiles, "1\n")
	fourth.Delete()
}

// setGroupPolicy changes a CSIDriver until the test has ended.
func setGroupPolicy(k *cluster.Kube, driver string, policy storagev1.FSGroupPolicy) {
	k.T.Helper()
	set := func(policy storagev1.FSGroupPolicy) {
		k.Eventually("driver "+driver+" gets its policy", func(ctx context.Context) error {
			is, err := k.Client.StorageV1().CSIDrivers().Get(ctx, driver, metav1.GetOptions{})
			if err != nil {
				return err
			}
			is.Spec.FSGroupPolicy = &policy
			_, err = k.Client.StorageV1().CSIDrivers().Update(ctx, is, metav1.UpdateOptions{})
			return err
		})
	}
	set(policy)
	k.T.Cleanup(func() { set(storagev1.FileFSGroupPolicy) })
}

// driverPolicies has the pod's group for the same volumes as kubelet has it without
// crust-proxy.
func driverPolicies(k *cluster.Kube, policy storagev1.FSGroupPolicy) {
	untyped := func(pv *corev1.PersistentVolume) { pv.Spec.CSI.FSType = "" }
	var pods []*cluster.Pod
	for class, driver := range map[string]string{cluster.Crust: cluster.Block, cluster.Runc: cluster.Plain} {
		id := strings.ToLower(fmt.Sprintf("%s-%s", policy, strings.TrimSuffix(driver, ".example.com")))
		v := k.NewVolume(cluster.VolumeOptions{Name: id, Driver: driver})
		bare := k.NewVolume(cluster.VolumeOptions{Name: "bare-" + id, Driver: driver, Change: untyped})
		p := k.NewPod(id, class).With(v, "/data").With(bare, "/bare")
		pods = append(pods, withGroup(p, corev1.FSGroupChangeAlways).Create())
	}
	all, none := "2000 2775\n", "0 755\n"
	want := map[storagev1.FSGroupPolicy]string{
		storagev1.NoneFSGroupPolicy: none + none, storagev1.ReadWriteOnceWithFSTypeFSGroupPolicy: all + none, storagev1.FileFSGroupPolicy: all + all,
	}
	for _, p := range pods {
		p.WaitReady()
		wantOut(k, p, "main", "stat -c '%g %a' /data /bare", want[policy])
		p.AskDelete()
	}
}
