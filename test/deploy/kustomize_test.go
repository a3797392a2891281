//go:build system

package deploy

import (
	"io/fs"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	k8slabels "k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/crust-proxy/crust-proxy/internal/daemon/config"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/deploy/render"
)

func TestEveryKustomizationBuilds(t *testing.T) {
	count := 0
	root := render.Kustomizations(t)
	err := filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Base(path) != "kustomization.yaml" {
			return err
		}
		dir, err := filepath.Rel(root, filepath.Dir(path))
		count++
		t.Run(dir, func(t *testing.T) {
			all := render.Objects(t, render.Kustomize(t, filepath.Join(root, dir)))
			for _, one := range all {
				if one.GetKind() == "ConfigMap" && one.GetName() == "crust-proxy" {
					validate(t, one)
				}
			}
		})
		return err
	})
	check.That(t, err == nil && count >= 12, "%d kustomizations: %v", count, err)
}

// TestCrustExampleSeesWhatItNeeds: the daemon runs crust-runc, which looks for processes of the node.
func TestCrustExampleSeesWhatItNeeds(t *testing.T) {
	pod := daemonSet(t, render.Objects(t, render.Kustomize(t, render.Kustomizations(t)+"/examples/crust"))).Spec.Template.Spec
	check.That(t, pod.HostPID && slices.ContainsFunc(pod.Containers[0].VolumeMounts, func(m corev1.VolumeMount) bool {
		return m.MountPath == "/opt/crust-proxy/bin"
	}), "processes %v, mounts %v", pod.HostPID, pod.Containers[0].VolumeMounts)
}

// TestBehindTheFront: the patch changes one path, to the directory where the front
// waits by default, and its opposite brings back what was there.
func TestBehindTheFront(t *testing.T) {
	dir := render.Kustomizations(t) + "/examples/behind-the-front/"
	stock, behind, direct := vendorsDriver(t, dir+"driver"), vendorsDriver(t, dir+"behind"), vendorsDriver(t, dir+"direct")
	front := config.Default().Front
	path := behind.takeRegistrationDir(t)
	check.That(t, path == front.Registry, "the driver registers in %s, and the front waits in %s", path, front.Registry)
	for what, path := range map[string]string{"the stock driver": stock.takeRegistrationDir(t), "the way back": direct.takeRegistrationDir(t)} {
		check.That(t, path == front.KubeletRegistry, "%s registers in %s", what, path)
	}
	check.Same(t, cmp.Diff(stock, behind), "the patch changes something else")
	check.Same(t, cmp.Diff(stock, direct), "the way back does not lead back")
}

// stockDriver is a driver's DaemonSet, with its volumes apart.
type stockDriver struct {
	Set     *appsv1.DaemonSet
	Volumes map[string]corev1.Volume
}

func vendorsDriver(t *testing.T, dir string) stockDriver {
	t.Helper()
	found := render.Find(t, render.Objects(t, render.Kustomize(t, dir)), "DaemonSet", "disk-csi-node")
	out := stockDriver{Set: &appsv1.DaemonSet{}, Volumes: map[string]corev1.Volume{}}
	check.Must(t, runtime.DefaultUnstructuredConverter.FromUnstructured(found.Object, out.Set))
	for _, volume := range out.Set.Spec.Template.Spec.Volumes {
		out.Volumes[volume.Name] = volume
	}
	out.Set.Spec.Template.Spec.Volumes = nil // a patched one comes first
	return out
}

func (d stockDriver) takeRegistrationDir(t *testing.T) string {
	t.Helper()
	volume, there := d.Volumes["registration-dir"]
	check.Require(t, there && volume.HostPath != nil, "the driver has no registration-dir")
	delete(d.Volumes, "registration-dir")
	return volume.HostPath.Path
}

// TestNamespaceAndNetworkPolicy: the namespace admits the DaemonSet, which is privileged, and the policy selects
// its pods, admits to its port of metrics alone, and admits nobody from outside of the two namespaces.
func TestNamespaceAndNetworkPolicy(t *testing.T) {
	root := render.Kustomizations(t)
	all := render.Objects(t, render.Kustomize(t, root+"/daemonset"))
	labels := render.Find(t, all, "Namespace", "crust-proxy").GetLabels()
	for _, mode := range []string{"enforce", "audit", "warn"} {
		check.That(t, labels["pod-security.kubernetes.io/"+mode] == "privileged", "the namespace has the labels %v", labels)
	}
	set, policy := &appsv1.DaemonSet{}, &networkingv1.NetworkPolicy{}
	check.Must(t, runtime.DefaultUnstructuredConverter.FromUnstructured(render.Find(t, all, "DaemonSet", "crust-proxy").Object, set))
	made := render.Find(t, render.Objects(t, render.Kustomize(t, root+"/networkpolicy")), "NetworkPolicy", "crust-proxy")
	check.Must(t, runtime.DefaultUnstructuredConverter.FromUnstructured(made.Object, policy))
	selector := check.Value(metav1.LabelSelectorAsSelector(&policy.Spec.PodSelector))(t)
	check.That(t, policy.Namespace == set.Namespace && !selector.Empty() && selector.Matches(k8slabels.Set(set.Spec.Template.Labels)),
		"it selects %v in %s", selector, policy.Namespace)
	port := networkingv1.NetworkPolicyPort{Protocol: new(corev1.ProtocolTCP), Port: new(intstr.FromString(set.Spec.Template.Spec.Containers[0].Ports[0].Name))}
	monitoring := &metav1.LabelSelector{MatchLabels: map[string]string{corev1.LabelMetadataName: "monitoring"}}
	want := networkingv1.NetworkPolicySpec{
		PodSelector: policy.Spec.PodSelector, PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress},
		Ingress: []networkingv1.NetworkPolicyIngressRule{{
			Ports: []networkingv1.NetworkPolicyPort{port},
			From:  []networkingv1.NetworkPolicyPeer{{PodSelector: &metav1.LabelSelector{}}, {NamespaceSelector: monitoring}},
		}},
	}
	check.Same(t, cmp.Diff(want, policy.Spec), "-want +got")
}

// TestServiceOfAllDaemons: docs/kubernetes.md has all daemons asked by it before a removal.
func TestServiceOfAllDaemons(t *testing.T) {
	all := render.Objects(t, render.Kustomize(t, render.Kustomizations(t)+"/daemonset"))
	service := &corev1.Service{}
	check.Must(t, runtime.DefaultUnstructuredConverter.FromUnstructured(render.Find(t, all, "Service", "crust-proxy").Object, service))
	selector := k8slabels.SelectorFromSet(service.Spec.Selector)
	check.That(t, !selector.Empty() && selector.Matches(k8slabels.Set(daemonSet(t, all).Spec.Template.Labels)), "it selects %v", selector)
}
