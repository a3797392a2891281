//go:build system

package admission

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/deploy/render"
	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
)

// patience is how long the API server may take to take up a policy.
const patience = time.Minute

// rig is a control plane with the chart installed.
type rig struct {
	*cluster.ControlPlane
	client   kubernetes.Interface
	warnings *warnings
}

// classes are three runtime classes of which each behaves otherwise.
const classes = `runtimeClasses=[
	{"name": "kata", "handler": "kata", "create": true, "subPath": false, "defer": "annotated", "annotate": true},
	{"name": "crust", "handler": "crust", "create": true, "subPath": true, "defer": "annotated", "annotate": false},
	{"name": "vm", "handler": "vm", "create": true, "subPath": false, "defer": "all", "annotate": false}
]`

func start(t *testing.T) *rig {
	t.Helper()
	r := &rig{ControlPlane: cluster.StartControlPlane(t), warnings: &warnings{}}
	config := rest.CopyConfig(r.Admin)
	config.WarningHandler = r.warnings
	var err error
	r.client, err = kubernetes.NewForConfig(config)
	check.Must(t, err)
	return r
}

// install installs the chart, or changes its values. helm asks the cluster what it serves.
func (r *rig) install(t *testing.T, args ...string) {
	t.Helper()
	check.Must(t, check.Err(render.Helm(t, append([]string{
		"upgrade", "--install", "crust-proxy", render.Chart(), "--kubeconfig=" + r.AdminKubeconfig,
		"--namespace=crust-proxy", "--create-namespace", "--set-json", classes,
	}, args...)...)))
}

// dry creates a pod and keeps nothing.
func (r *rig) dry(t *testing.T, pod *corev1.Pod) (*corev1.Pod, error) {
	return r.client.CoreV1().Pods("default").Create(t.Context(), pod, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
}

// await waits until a policy is in force: the API server takes it up a moment later.
func await(t *testing.T, what string, there func() bool) {
	t.Helper()
	check.Eventually(t, what+" is in force", there)
}

// inForce waits for the runtime classes and for each of the validating policies: the
// API server takes them up one by one.
func (r *rig) inForce(t *testing.T) {
	t.Helper()
	for _, class := range []string{"kata", "crust", "vm"} {
		await(t, "the runtime class "+class, func() bool { _, err := r.dry(t, pod(class)); return err == nil })
	}
	asks := pod("kata", annotated("data"), claim("data"))
	await(t, "the policy for pods", func() bool {
		_, err := r.dry(t, pod("kata", annotated("!"), claim("data")))
		return err != nil
	})
	await(t, "the policy for workloads", func() bool { return r.makes(t, deployment(2, asks, "Recreate")) != nil })
	await(t, "the policy for rollouts", func() bool {
		r.warnings.take()
		return r.makes(t, deployment(1, asks, "")) == nil && len(r.warnings.take()) > 0
	})
	living := check.Value(r.client.CoreV1().Pods("default").Create(t.Context(), asks, metav1.CreateOptions{}))(t)
	await(t, "the policy for living pods", func() bool {
		_, err := r.client.CoreV1().Pods("default").Patch(t.Context(), living.Name, types.MergePatchType,
			[]byte(`{"metadata":{"annotations":{"crust-proxy.dev/defer":"*"}}}`), metav1.PatchOptions{DryRun: []string{metav1.DryRunAll}})
		return err != nil
	})
}

// warnings collects those of the API server.
type warnings struct {
	mu  sync.Mutex
	all []string
}

// HandleWarningHeader is told each warning.
func (w *warnings) HandleWarningHeader(_ int, _, text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.all = append(w.all, text)
}

// take gives what has come since the last time.
func (w *warnings) take() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	defer func() { w.all = nil }()
	return slices.Clone(w.all)
}

// a pod is made of few words.
func pod(class string, with ...func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "pod-"},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "busybox"}}},
	}
	if class != "" {
		p.Spec.RuntimeClassName = &class
	}
	for _, one := range with {
		one(p)
	}
	return p
}

func annotated(value string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Annotations = map[string]string{policy.AnnotationKey: value} }
}

func volume(name string, source corev1.VolumeSource, mount ...func(*corev1.VolumeMount)) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: name, VolumeSource: source})
		m := corev1.VolumeMount{Name: name, MountPath: "/" + name}
		for _, one := range mount {
			one(&m)
		}
		p.Spec.Containers[0].VolumeMounts = append(p.Spec.Containers[0].VolumeMounts, m)
	}
}

func claim(name string, mount ...func(*corev1.VolumeMount)) func(*corev1.Pod) {
	return volume(name, claimSource(name, false), mount...)
}

func claimSource(name string, readOnly bool) corev1.VolumeSource {
	return corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: name, ReadOnly: readOnly}}
}

func subPath(m *corev1.VolumeMount)     { m.SubPath = "sub" }
func subPathExpr(m *corev1.VolumeMount) { m.SubPathExpr = "$(HOSTNAME)" }

// device adds a claim that is a raw block volume.
func device(name string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: name, VolumeSource: claimSource(name, false)})
		p.Spec.Containers[0].VolumeDevices = []corev1.VolumeDevice{{Name: name, DevicePath: "/dev/" + name}}
	}
}

func inline(name, driver, secret string) func(*corev1.Pod) {
	source := &corev1.CSIVolumeSource{Driver: driver}
	if secret != "" {
		source.NodePublishSecretRef = &corev1.LocalObjectReference{Name: secret}
	}
	return volume(name, corev1.VolumeSource{CSI: source})
}

func ephemeral(name string) func(*corev1.Pod) {
	return volume(name, corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{VolumeClaimTemplate: &corev1.PersistentVolumeClaimTemplate{
		Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources:   corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: quantity("1Gi")}},
		},
	}}})
}

func scratch(name string) func(*corev1.Pod) {
	return volume(name, corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}})
}

// initMounts mounts a volume in an init container, with a subPath.
func initMounts(name string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.InitContainers = []corev1.Container{{Name: "first", Image: "busybox", VolumeMounts: []corev1.VolumeMount{
			{Name: name, MountPath: "/" + name, SubPath: "sub"},
		}}}
	}
}

// says tells whether an answer is as wanted: no error, or one by that policy with those words, and no others of ours.
func says(err error, policy string, words ...string) error {
	if len(words) == 0 {
		return err
	}
	if err == nil {
		return fmt.Errorf("it was accepted, and not refused with %q", words)
	}
	for _, word := range append(words, "ValidatingAdmissionPolicy 'crust-proxy-"+policy+"'") {
		if !strings.Contains(err.Error(), word) {
			return fmt.Errorf("%q is not in: %w", word, err)
		}
	}
	return nil
}
