//go:build system

package kube_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
)

// TestNodeIsDrained has a node drained as for maintenance: no pod goes that a budget
// protects, then all go with their volumes, and they come back to them afterwards.
func TestNodeIsDrained(t *testing.T) {
	k := cluster.On(t)
	k.StartSidecars(cluster.Block)
	s := k.NewStatefulSet("drained", cluster.Block, 1)
	p := s.Ready()[0]
	v := s.Volume(p)
	p.Exec("echo kept > /data/file && sync")
	t.Cleanup(func() { _, err := k.Kubectl("uncordon", cluster.NodeName); k.Must(err) })
	protect(k, func() {
		_, err := k.Kubectl("drain", cluster.NodeName, "--timeout=8s")
		if err == nil || !strings.Contains(err.Error(), "disruption budget") {
			t.Errorf("a drain beyond a budget: %v", err)
		}
		wantDeferred(k, p, v, inCrust)
		wantOut(k, p, "main", "cat /data/file && touch /data/works", "kept\n")
	})
	_, err := k.Kubectl("drain", cluster.NodeName, "--timeout="+cluster.Patience.String())
	k.Must(err)
	k.Must(k.WantNothingLeft())
	if listed, err := listed(k); err != nil || len(listed) > 0 {
		t.Errorf("on a drained node crustctl lists %+v, %v", listed, err)
	}
	_, err = k.Kubectl("uncordon", cluster.NodeName)
	k.Must(err)
	p = s.Ready(p)[0]
	wantDeferred(k, p, v, inCrust)
	wantOut(k, p, "main", "cat /data/file", "kept\n")
}

// protect has a budget that allows no pod to be evicted, for a time.
func protect(k *cluster.Kube, during func()) {
	k.T.Helper()
	budgets, all := k.Client.PolicyV1().PodDisruptionBudgets(cluster.Namespace), intstr.FromInt32(0)
	_, err := budgets.Create(k.T.Context(), &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: "none-may-go", Namespace: cluster.Namespace},
		Spec:       policyv1.PodDisruptionBudgetSpec{MaxUnavailable: &all, Selector: &metav1.LabelSelector{}},
	}, metav1.CreateOptions{})
	k.Must(err)
	defer func() { k.Must(budgets.Delete(context.Background(), "none-may-go", metav1.DeleteOptions{})) }()
	during()
}

// TestPodIsEvicted has kubelet itself end a pod, for what it has written elsewhere: the
// next pod finds the volume.
func TestPodIsEvicted(t *testing.T) {
	k := cluster.On(t)
	k.StartSidecars(cluster.Native)
	s := k.NewStatefulSet("evicted", cluster.Native, 1, func(spec *corev1.PodSpec) {
		limit := resource.MustParse("1Mi")
		spec.Volumes = append(spec.Volumes, corev1.Volume{Name: "scratch", VolumeSource: corev1.VolumeSource{
			EmptyDir: &corev1.EmptyDirVolumeSource{SizeLimit: &limit},
		}})
		main := &spec.Containers[0]
		main.VolumeMounts = append(main.VolumeMounts, corev1.VolumeMount{Name: "scratch", MountPath: "/scratch"})
	})
	p := s.Ready()[0]
	p.Exec("echo kept > /data/file && sync && head -c 8388608 /dev/zero > /scratch/much")
	p.WaitEvent("Evicted", "exceeds the limit")
	p = s.Ready(p)[0]
	wantDeferred(k, p, s.Volume(p), inCrust)
	wantOut(k, p, "main", "cat /data/file", "kept\n")
}

// TestNodeReboots has the same pods find their volumes again after the node was off, those
// in sandboxes and one beside them.
func TestNodeReboots(t *testing.T) {
	k := cluster.On(t)
	k.StartSidecars(cluster.Block, cluster.Native)
	beside := k.NewClaim(cluster.VolumeOptions{Name: "beside", Driver: cluster.Block})
	all := map[*cluster.Pod]*cluster.Volume{k.NewPod("beside", cluster.Runc).With(beside, "/data").Start(): beside.Bound()}
	for way, driver := range ways {
		s := k.NewStatefulSet("rebooted-"+way, driver, 1)
		p := s.Ready()[0]
		all[p] = s.Volume(p)
	}
	for p := range all {
		p.Exec("echo kept > /data/file && sync")
	}
	k.Reboot()
	waitNodeEvent(k, "Rebooted")
	for p, v := range all {
		waitRestarted(k, p)
		wantOut(k, p, "main", "cat /data/file && touch /data/works", "kept\n")
		if v == beside {
			wantOnHost(k, p, v)
			continue
		}
		wantDeferred(k, p, v, inCrust)
		wantGuarded(k, p, v)
	}
}

// waitRestarted waits until a pod's container has been started anew, and is ready.
func waitRestarted(k *cluster.Kube, p *cluster.Pod) {
	k.T.Helper()
	k.Eventually("pod "+p.Name+" is restarted", func(ctx context.Context) error {
		is, err := p.Get(ctx)
		if err != nil {
			return err
		}
		for _, one := range is.Status.ContainerStatuses {
			if one.RestartCount == 0 || !one.Ready {
				return fmt.Errorf("restarts: %d, ready: %t; %s", one.RestartCount, one.Ready, strings.Join(p.Events(), "; "))
			}
		}
		return nil
	})
}

// waitNodeEvent waits until the node has an event.
func waitNodeEvent(k *cluster.Kube, reason string) {
	k.T.Helper()
	k.Eventually("the node has an event "+reason, func(ctx context.Context) error {
		events, err := k.Client.CoreV1().Events(cluster.Namespace).List(ctx, metav1.ListOptions{
			FieldSelector: "involvedObject.kind=Node,reason=" + reason,
		})
		if err == nil && len(events.Items) == 0 {
			err = errors.New("there is none")
		}
		return err
	})
}
