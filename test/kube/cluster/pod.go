package cluster

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/crust-proxy/crust-proxy/test/rig/cri"
)

// Pod is a pod of a test, before and after it is made.
type Pod struct {
	// Object is what is created. Change it as you like before.
	*corev1.Pod
	k *Kube
}

// Forever is a script that ends at once when it is asked to.
const Forever = "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done"

// NewPod prepares a pod with one container, main, that sleeps. The class is Crust, Runc, or the name of a RuntimeClass.
func (k *Kube) NewPod(name, class string) *Pod {
	grace, automount := int64(5), false
	object := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: Namespace},
		Spec: corev1.PodSpec{
			HostNetwork: true, DNSPolicy: corev1.DNSDefault, RestartPolicy: corev1.RestartPolicyAlways,
			TerminationGracePeriodSeconds: &grace, AutomountServiceAccountToken: &automount,
			Containers: []corev1.Container{Container("main", Forever)},
		},
	}
	if class != Runc {
		object.Spec.RuntimeClassName = &class
	}
	return &Pod{Pod: object, k: k}
}

// Container is a container that runs a shell script.
func Container(name, script string) corev1.Container {
	return corev1.Container{
		Name: name, Image: cri.BusyboxImage, ImagePullPolicy: corev1.PullNever, Command: []string{"/bin/sh", "-c", script},
	}
}

// Sleeper is a container that sleeps until it is asked to end.
func Sleeper(name string) corev1.Container { return Container(name, Forever) }

// With mounts a volume in the container main, or gives it as a device where it is a
// raw block volume. Changes are made to the mount, say its SubPath.
func (p *Pod) With(v *Volume, path string, changes ...func(*corev1.VolumeMount)) *Pod {
	p.AddClaim(v)
	main := &p.Spec.Containers[0]
	if v.Raw {
		main.VolumeDevices = append(main.VolumeDevices, corev1.VolumeDevice{Name: v.Name, DevicePath: path})
		return p
	}
	mount := corev1.VolumeMount{Name: v.Name, MountPath: path}
	for _, change := range changes {
		change(&mount)
	}
	main.VolumeMounts = append(main.VolumeMounts, mount)
	return p
}

// AddClaim has the pod use a volume, under the volume's name, without a mount.
func (p *Pod) AddClaim(v *Volume) *Pod {
	if slices.ContainsFunc(p.Spec.Volumes, func(one corev1.Volume) bool { return one.Name == v.Name }) {
		return p
	}
	p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: v.Name, VolumeSource: corev1.VolumeSource{
		PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: v.Name},
	}})
	return p
}

// WithInline mounts an inline ephemeral volume of a driver in the container main.
func (p *Pod) WithInline(name, driver, path string, size int64) *Pod {
	p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{
		CSI: &corev1.CSIVolumeSource{Driver: driver, VolumeAttributes: map[string]string{
			"size": resource.NewQuantity(size, resource.BinarySI).String(),
		}},
	}})
	main := &p.Spec.Containers[0]
	main.VolumeMounts = append(main.VolumeMounts, corev1.VolumeMount{Name: name, MountPath: path})
	return p
}

// Script has the container main run a script instead of sleeping.
func (p *Pod) Script(script string) *Pod {
	p.Spec.Containers[0].Command = []string{"/bin/sh", "-c", script}
	return p
}

// Create makes the pod and waits for nothing. It goes with the test.
func (p *Pod) Create() *Pod {
	p.k.T.Helper()
	p.k.T.Cleanup(func() {
		if p.k.T.Failed() {
			p.k.T.Log(p.Describe())
		}
		p.k.check(p.k.Mend())
		p.k.check(p.remove())
	})
	ctx := context.Background()
	made, err := p.k.Client.CoreV1().Pods(Namespace).Create(ctx, p.Pod, metav1.CreateOptions{})
	p.k.Must(err)
	p.Pod = made
	return p
}

// Start makes the pod and waits until it runs.
func (p *Pod) Start() *Pod {
	p.k.T.Helper()
	p.Create()
	p.WaitReady()
	return p
}

// Get reads the pod as it is now.
func (p *Pod) Get(ctx context.Context) (*corev1.Pod, error) {
	is, err := p.k.Client.CoreV1().Pods(Namespace).Get(ctx, p.Name, metav1.GetOptions{})
	if err == nil && p.UID != "" && is.UID != p.UID {
		return nil, fmt.Errorf("pod %s is another one now", p.Name)
	}
	return is, err
}

// WaitReady waits until all containers run and are ready.
func (p *Pod) WaitReady() {
	p.k.T.Helper()
	p.k.Eventually("pod "+p.Name+" runs", func(ctx context.Context) error {
		is, err := p.Get(ctx)
		if err != nil {
			return err
		}
		if isReady(is) {
			return nil
		}
		return fmt.Errorf("it is %s: %s", is.Status.Phase, strings.Join(p.Events(), "; "))
	})
}

// AskDelete asks for the pod's end and waits for nothing.
func (p *Pod) AskDelete() {
	p.k.T.Helper()
	ctx := context.Background()
	p.k.Must(ignoreGone(p.k.Client.CoreV1().Pods(Namespace).Delete(ctx, p.Name, metav1.DeleteOptions{})))
}

// Delete ends the pod and waits until it has gone, with its volumes.
func (p *Pod) Delete() {
	p.k.T.Helper()
	p.k.Must(p.remove())
}

// remove asks for the pod's end until that is accepted, and waits for it.
func (p *Pod) remove() error {
	if p.UID == "" {
		return nil // it was never made
	}
	return removed("pod", p.Name, p.k.Client.CoreV1().Pods(Namespace), metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &p.UID}})
}

func isReady(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}
