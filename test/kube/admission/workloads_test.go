//go:build system

package admission

import (
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/crust-proxy/crust-proxy/test/check"
)

var (
	labels   = map[string]string{"app": "x"}
	selector = &metav1.LabelSelector{MatchLabels: labels}
	keepNone = metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}
)

func template(p *corev1.Pod) corev1.PodTemplateSpec {
	return corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels, Annotations: p.Annotations}, Spec: p.Spec}
}

func named(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Name: name} }

func deployment(replicas int32, p *corev1.Pod, strategy appsv1.DeploymentStrategyType) *appsv1.Deployment {
	return &appsv1.Deployment{ObjectMeta: named("x"), Spec: appsv1.DeploymentSpec{
		Replicas: &replicas, Selector: selector, Template: template(p), Strategy: appsv1.DeploymentStrategy{Type: strategy},
	}}
}

func TestWorkloads(t *testing.T) {
	r := start(t)
	r.install(t)
	asks := pod("kata", annotated("data"), claim("data"))
	reads := pod("vm", volume("data", claimSource("data", true)))
	r.inForce(t)

	two, one := int32(2), int32(1)
	always := template(pod("vm", claim("data")))
	always.Spec.RestartPolicy = corev1.RestartPolicyNever
	own := corev1.PersistentVolumeClaim{ObjectMeta: named("data"), Spec: corev1.PersistentVolumeClaimSpec{
		AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
		Resources:   corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: quantity("1Gi")}},
	}}
	ownOfEach := pod("kata", annotated("data"))
	for what, is := range map[string]struct {
		object any
		want   []string
	}{
		"one pod":               {deployment(1, asks, appsv1.RecreateDeploymentStrategyType), nil},
		"two that only read":    {deployment(2, reads, ""), nil},
		"two not deferred":      {deployment(2, pod("kata", claim("data")), ""), nil},
		"two of no class":       {deployment(2, pod("", claim("data")), ""), nil},
		"two raw block volumes": {deployment(2, pod("vm", device("data")), ""), nil},
		"two with scratch":      {deployment(2, pod("vm", ephemeral("data")), ""), nil},
		"two": {
			deployment(2, asks, appsv1.RecreateDeploymentStrategyType),
			[]string{"the Deployment has 2 pods, which would share the volume data (claim data)", "volumeClaimTemplates", "readOnly: true"},
		},
		"two of a class of all": {deployment(2, pod("vm", claim("data")), ""), []string{"has 2 pods", "data (claim data)"}},
		"a ReplicaSet": {
			&appsv1.ReplicaSet{ObjectMeta: named("x"), Spec: appsv1.ReplicaSetSpec{Replicas: &two, Selector: selector, Template: template(asks)}},
			[]string{"the ReplicaSet has 2 pods"},
		},
		"a DaemonSet": {
			&appsv1.DaemonSet{ObjectMeta: named("x"), Spec: appsv1.DaemonSetSpec{Selector: selector, Template: template(asks)}},
			[]string{"the DaemonSet has a pod on each node"},
		},
		"a DaemonSet that reads": {&appsv1.DaemonSet{ObjectMeta: named("x"), Spec: appsv1.DaemonSetSpec{Selector: selector, Template: template(reads)}}, nil},
		"a StatefulSet": {
			&appsv1.StatefulSet{ObjectMeta: named("x"), Spec: appsv1.StatefulSetSpec{Replicas: &two, Selector: selector, Template: template(asks)}},
			[]string{"the StatefulSet has 2 pods"},
		},
		"a StatefulSet with claims of its own": {&appsv1.StatefulSet{ObjectMeta: named("x"), Spec: appsv1.StatefulSetSpec{
			Replicas: &two, Selector: selector, Template: template(ownOfEach), VolumeClaimTemplates: []corev1.PersistentVolumeClaim{own},
		}}, nil},
		"a parallel Job": {
			&batchv1.Job{ObjectMeta: named("x"), Spec: batchv1.JobSpec{Parallelism: &two, Template: always}},
			[]string{"the Job has 2 pods at a time"},
		},
		"a Job": {&batchv1.Job{ObjectMeta: named("x"), Spec: batchv1.JobSpec{Parallelism: &one, Completions: &two, Template: always}}, nil},
	} {
		t.Run(what, func(t *testing.T) {
			check.Must(t, says(r.makes(t, is.object), "workloads", is.want...))
		})
	}
	rollouts(t, r)
	livingWorkloads(t, r)
}

// makes creates an object and keeps nothing.
func (r *rig) makes(t *testing.T, object any) error {
	t.Helper()
	apps, ctx := r.client.AppsV1(), t.Context()
	var err error
	switch o := object.(type) {
	case *appsv1.Deployment:
		_, err = apps.Deployments("default").Create(ctx, o, keepNone)
	case *appsv1.ReplicaSet:
		_, err = apps.ReplicaSets("default").Create(ctx, o, keepNone)
	case *appsv1.StatefulSet:
		_, err = apps.StatefulSets("default").Create(ctx, o, keepNone)
	case *appsv1.DaemonSet:
		_, err = apps.DaemonSets("default").Create(ctx, o, keepNone)
	case *batchv1.Job:
		_, err = r.client.BatchV1().Jobs("default").Create(ctx, o, keepNone)
	default:
		t.Fatalf("no case for %T", object)
	}
	return err
}

// rollouts: what cannot be rolled over is warned of, and accepted.
func rollouts(t *testing.T, r *rig) {
	t.Helper()
	asks := pod("kata", annotated("data"), claim("data"))
	for what, is := range map[string]struct {
		made *appsv1.Deployment
		want bool
	}{
		"rolling update":  {deployment(1, asks, ""), true},
		"recreated":       {deployment(1, asks, appsv1.RecreateDeploymentStrategyType), false},
		"only reads":      {deployment(1, pod("vm", volume("data", claimSource("data", true))), ""), false},
		"nothing to wait": {deployment(1, pod("kata", claim("data")), ""), false},
	} {
		r.warnings.take()
		check.NoError(t, r.makes(t, is.made), "%s", what)
		said := strings.Join(r.warnings.take(), "\n")
		check.That(t, strings.Contains(said, "Set strategy.type: Recreate") == is.want, "%s: the warnings are %q", what, said)
	}
}

// livingWorkloads: one that was there before can be changed in other things and deleted, and cannot be made worse.
func livingWorkloads(t *testing.T, r *rig) {
	t.Helper()
	sets := r.client.AppsV1().ReplicaSets("default")
	patch := func(change string) error {
		_, err := sets.Patch(t.Context(), "x", types.MergePatchType, []byte(change), metav1.PatchOptions{})
		return err
	}
	one := int32(1)
	r.install(t, "--set=admission.validate.enabled=false")
	set := &appsv1.ReplicaSet{ObjectMeta: named("x"), Spec: appsv1.ReplicaSetSpec{
		Replicas: &one, Selector: selector, Template: template(pod("kata", annotated("data"), claim("data"))),
	}}
	check.Value(sets.Create(t.Context(), set, metav1.CreateOptions{}))(t)
	await(t, "the policies' absence", func() bool { return patch(`{"spec":{"replicas":3}}`) == nil })
	r.install(t)
	await(t, "the policy for workloads", func() bool {
		return r.makes(t, deployment(2, pod("vm", claim("data")), appsv1.RecreateDeploymentStrategyType)) != nil
	})
	for change, words := range map[string][]string{
		`{"spec":{"replicas":4}}`:                          {"the ReplicaSet has 4 pods"},
		`{"spec":{"replicas":2}}`:                          nil, // as by a rolling update
		`{"metadata":{"labels":{"a":"b"}}}`:                nil,
		`{"metadata":{"finalizers":["example.com/kept"]}}`: nil,
		`{"metadata":{"finalizers":null}}`:                 nil,
	} {
		check.NoError(t, says(patch(change), "workloads", words...), "%s", change)
	}
	check.Must(t, patch(`{"spec":{"replicas":1}}`))
	check.Must(t, sets.Delete(t.Context(), "x", metav1.DeleteOptions{}))
}
