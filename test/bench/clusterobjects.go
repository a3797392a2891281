package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"

	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
)

const clusterObjects = `apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata: {name: kata}
handler: kata
---
apiVersion: storage.k8s.io/v1
kind: CSIDriver
metadata: {name: ` + driverName + `}
spec: {attachRequired: false, podInfoOnMount: true, fsGroupPolicy: File, volumeLifecycleModes: [Persistent]}
`

// podOfNode is a pod that the API server has, and its volumes.
type podOfNode struct {
	uid     string
	volumes []string
}

// makers is how many pods are created at once.
const makers = 8

// createPods creates pods of a usual size that run on the node, each with claims that are bound.
func createPods(r *testbed, plane *cluster.ControlPlane, count int) []podOfNode {
	pods := make([]podOfNode, count)
	group, ctx := errgroup.WithContext(r.ctx)
	group.SetLimit(makers)
	for i := range pods {
		group.Go(func() (err error) {
			pods[i], err = createPod(ctx, plane.Client, fmt.Sprintf("web-%03d", i))
			return err
		})
	}
	r.must(group.Wait())
	return pods
}

func createPod(ctx context.Context, client kubernetes.Interface, name string) (podOfNode, error) {
	made := podOfNode{}
	core := client.CoreV1()
	for i := range volumesOfPod {
		volume := fmt.Sprintf("pvc-%s-%d", name, i)
		made.volumes = append(made.volumes, volume)
		if err := createVolume(ctx, client, volume); err != nil {
			return made, err
		}
	}
	pod, err := core.Pods(metav1.NamespaceDefault).Create(ctx, usualPod(name, made.volumes), metav1.CreateOptions{})
	if err != nil {
		return made, err
	}
	made.uid = string(pod.UID)
	pod.Status = usualStatus(pod)
	_, err = core.Pods(metav1.NamespaceDefault).UpdateStatus(ctx, pod, metav1.UpdateOptions{})
	return made, err
}

// createVolume makes a volume and a claim that is bound to it.
func createVolume(ctx context.Context, client kubernetes.Interface, name string) error {
	core, class := client.CoreV1(), "disks"
	capacity := corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}
	modes := []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}
	claim, err := core.PersistentVolumeClaims(metav1.NamespaceDefault).Create(ctx, &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PersistentVolumeClaimSpec{AccessModes: modes, StorageClassName: &class, VolumeName: name,
			Resources: corev1.VolumeResourceRequirements{Requests: capacity}},
	}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	volume, err := core.PersistentVolumes().Create(ctx, &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PersistentVolumeSpec{
			Capacity: capacity, AccessModes: modes, StorageClassName: class, PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimDelete,
			ClaimRef: &corev1.ObjectReference{Kind: "PersistentVolumeClaim", APIVersion: "v1", Namespace: claim.Namespace, Name: name, UID: claim.UID},
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{
				Driver: driverName, VolumeHandle: name, FSType: "ext4", VolumeAttributes: map[string]string{"pool": "fast"},
			}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	claim.Status = corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound, AccessModes: modes, Capacity: capacity}
	if _, err = core.PersistentVolumeClaims(metav1.NamespaceDefault).UpdateStatus(ctx, claim, metav1.UpdateOptions{}); err != nil {
		return err
	}
	volume.Status = corev1.PersistentVolumeStatus{Phase: corev1.VolumeBound}
	_, err = core.PersistentVolumes().UpdateStatus(ctx, volume, metav1.UpdateOptions{})
	return err
}

// usualPod is a pod as a Deployment makes it: a web server with a side-car, probes, labels, environment and resources.
func usualPod(name string, volumes []string) *corev1.Pod {
	class := "kata"
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Labels: map[string]string{"app.kubernetes.io/name": "web", "app.kubernetes.io/instance": name, "pod-template-hash": "7d9f8b6c5"},
			Annotations: map[string]string{"kubectl.kubernetes.io/restartedAt": "2026-11-21T12:00:00Z", "checksum/config": strings.Repeat("3f", 32)},
		},
		Spec: corev1.PodSpec{NodeName: nodeName, RuntimeClassName: &class, Containers: []corev1.Container{usualContainer("web", 8080), usualContainer("side-car", 9090)}},
	}
	for i, volume := range volumes {
		pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: volume, VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: volume},
		}})
		main := &pod.Spec.Containers[0]
		main.VolumeMounts = append(main.VolumeMounts, corev1.VolumeMount{Name: volume, MountPath: fmt.Sprintf("/data/%d", i)})
	}
	return pod
}

func usualContainer(name string, port int32) corev1.Container {
	c := corev1.Container{
		Name: name, Image: "registry.example.com/team/" + name + ":v1.2.3@sha256:" + strings.Repeat("5a", 32),
		Ports: []corev1.ContainerPort{{Name: name, ContainerPort: port}},
		Resources: corev1.ResourceRequirements{
			Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("100m"), corev1.ResourceMemory: resource.MustParse("128Mi")},
		},
		ReadinessProbe: &corev1.Probe{ProbeHandler: corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt32(port)}}, PeriodSeconds: 10},
	}
	for i := range 12 {
		c.Env = append(c.Env, corev1.EnvVar{Name: fmt.Sprintf("SETTING_%d", i), Value: strings.Repeat("value ", 8)})
	}
	return c
}

// usualStatus is what kubelet writes of a pod that runs.
func usualStatus(pod *corev1.Pod) corev1.PodStatus {
	now := metav1.NewTime(time.Now())
	status := corev1.PodStatus{Phase: corev1.PodRunning, HostIP: "10.0.0.1", PodIP: "10.1.2.3", StartTime: &now, QOSClass: corev1.PodQOSBurstable}
	for _, kind := range []corev1.PodConditionType{corev1.PodReadyToStartContainers, corev1.PodInitialized, corev1.PodReady, corev1.ContainersReady, corev1.PodScheduled} {
		status.Conditions = append(status.Conditions, corev1.PodCondition{Type: kind, Status: corev1.ConditionTrue, LastTransitionTime: now})
	}
	for _, c := range pod.Spec.Containers {
		status.ContainerStatuses = append(status.ContainerStatuses, corev1.ContainerStatus{
			Name: c.Name, Ready: true, Image: c.Image, ImageID: c.Image, ContainerID: "containerd://" + strings.Repeat("7e", 32),
			State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: now}},
		})
	}
	return status
}
