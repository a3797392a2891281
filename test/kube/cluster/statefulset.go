package cluster

import (
	"context"
	"errors"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// claimTemplate is the name of a StatefulSet's only volume.
const claimTemplate = "data"

// StatefulSet has pods in the class Crust, each with a claim of its own on /data, which
// the sidecars make. The claims go with it.
type StatefulSet struct {
	name, driver string
	replicas     int
	k            *Kube
}

// NewStatefulSet makes a StatefulSet, and waits for nothing. Changes are made to the template of its pods.
func (k *Kube) NewStatefulSet(name, driver string, replicas int, changes ...func(*corev1.PodSpec)) *StatefulSet {
	k.T.Helper()
	s := &StatefulSet{name: name, driver: driver, replicas: replicas, k: k}
	pod := k.NewPod("", Crust)
	pod.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: claimTemplate, MountPath: "/data"}}
	for _, change := range changes {
		change(&pod.Spec)
	}
	labels, count := map[string]string{"set": name}, int32(replicas) //nolint:gosec // a few
	ctx := context.Background()
	_, err := k.Client.AppsV1().StatefulSets(Namespace).Create(ctx, &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: Namespace},
		Spec: appsv1.StatefulSetSpec{
			Replicas: &count, Selector: &metav1.LabelSelector{MatchLabels: labels}, PodManagementPolicy: appsv1.ParallelPodManagement,
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: pod.Spec},
			VolumeClaimTemplates: []corev1.PersistentVolumeClaim{{
				ObjectMeta: metav1.ObjectMeta{Name: claimTemplate}, Spec: VolumeOptions{Driver: driver, FS: "xfs"}.DelayedSpec(),
			}},
			PersistentVolumeClaimRetentionPolicy: &appsv1.StatefulSetPersistentVolumeClaimRetentionPolicy{
				WhenDeleted: appsv1.DeletePersistentVolumeClaimRetentionPolicyType, WhenScaled: appsv1.RetainPersistentVolumeClaimRetentionPolicyType,
			},
		},
	}, metav1.CreateOptions{})
	k.Must(err)
	k.T.Cleanup(func() {
		if k.T.Failed() {
			out, err := k.Kubectl("describe", "pods,persistentvolumeclaims")
			k.T.Log(out, err)
		}
		k.check(s.Remove())
	})
	return s
}

// Ready waits until all pods are ready, and gives them. Pods that were there before are
// of no interest: those given are not among them.
func (s *StatefulSet) Ready(before ...*Pod) []*Pod {
	s.k.T.Helper()
	out := make([]*Pod, s.replicas)
	for i := range out {
		name := fmt.Sprintf("%s-%d", s.name, i)
		s.k.Eventually("pod "+name+" is ready", func(ctx context.Context) error {
			is, err := s.k.Client.CoreV1().Pods(Namespace).Get(ctx, name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			for _, old := range before {
				if old.UID == is.UID {
					return errors.New("it is still the one from before")
				}
			}
			out[i] = &Pod{Pod: is, k: s.k}
			if !isReady(is) || is.DeletionTimestamp != nil {
				return fmt.Errorf("it is %s: %v", is.Status.Phase, out[i].Events())
			}
			return nil
		})
	}
	return out
}

// Volume is the one of a pod, once it is bound.
func (s *StatefulSet) Volume(p *Pod) *Volume {
	s.k.T.Helper()
	return s.k.ClaimOf(claimTemplate+"-"+p.Name, s.driver)
}

// Scale says how many pods there shall be.
func (s *StatefulSet) Scale(replicas int) {
	s.k.T.Helper()
	_, err := s.k.Kubectl("scale", "statefulset/"+s.name, fmt.Sprintf("--replicas=%d", replicas))
	s.k.Must(err)
	s.replicas = replicas
}

// Gone tells whether it has no pods any more.
func (s *StatefulSet) Gone(ctx context.Context) error {
	list, err := s.k.Client.CoreV1().Pods(Namespace).List(ctx, metav1.ListOptions{LabelSelector: "set=" + s.name})
	if err == nil && len(list.Items) > 0 {
		err = fmt.Errorf("there are %d pods", len(list.Items))
	}
	return err
}

// Remove deletes it, and waits until its pods and their claims have gone.
func (s *StatefulSet) Remove() error {
	sets, foreground := s.k.Client.AppsV1().StatefulSets(Namespace), metav1.DeletePropagationForeground
	mended := s.k.Mend()
	return errors.Join(mended, removed("StatefulSet", s.name, sets, metav1.DeleteOptions{PropagationPolicy: &foreground}),
		eventually("pods and claims of StatefulSet "+s.name+" go", func(ctx context.Context) error {
			claims, err := s.k.Client.CoreV1().PersistentVolumeClaims(Namespace).List(ctx, metav1.ListOptions{LabelSelector: "set=" + s.name})
			if err == nil && len(claims.Items) > 0 {
				err = fmt.Errorf("there are %d claims", len(claims.Items))
			}
			return errors.Join(err, s.Gone(ctx))
		}))
}
