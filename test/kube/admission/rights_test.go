//go:build system

package admission

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/crust-proxy/crust-proxy/internal/front/pods"
	"github.com/crust-proxy/crust-proxy/internal/ground/apiserver"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/deploy/render"
)

const (
	diskDriver = "disk.csi.example.com"
	subject    = "crust-proxy-node" // as in ci/node-installed-values.yaml
)

// TestTheRoleIsEnough: the chart's ClusterRole lets the pod look-up do all that it
// does, and nothing of what it does not do.
func TestTheRoleIsEnough(t *testing.T) {
	r := start(t)
	r.defineForeignTypes(t)
	r.install(t, "--values="+filepath.Join(render.Chart(), "ci/node-installed-values.yaml"), "--set=admission.mutate.enabled=false")
	access := r.Kubeconfig(subject)
	check.Must(t, os.Chmod(access, 0o600))
	await(t, "the runtime class", func() bool { _, err := r.dry(t, pod("crust")); return err == nil })
	made := r.podWithDisk(t)

	looksUp := pods.New(pods.Config{
		Identity: apiserver.Identity{Kubeconfig: access, UserAgent: "test"}, NodeName: "node-a", Patience: patience, Log: zap.NewNop(),
	})
	stop := check.Running(t, looksUp.Run)
	got, err := looksUp.ByUID(t.Context(), string(made.UID))
	check.That(t, err == nil, "%v", err)
	check.That(t, len(got.Volumes) == 1 && got.Volumes[0].Driver == diskDriver && got.Volumes[0].VolumeID == "vol-1" && got.RuntimeHandler == "crust",
		"it knows of the pod: %+v", got)
	using, err := looksUp.Using(t.Context(), diskDriver, "vol-1")
	check.That(t, err == nil && len(using) == 1, "pods that use the volume: %v, %v", using, err)
	_, err = looksUp.NodeDrivers(t.Context())
	check.That(t, err != nil && strings.Contains(err.Error(), "does not exist"), "a CSINode that does not exist, and may be read: %v", err)
	stop()
	hasNoMore(t, access)
}

// podWithDisk makes a pod on a node, with a claim that is bound.
func (r *rig) podWithDisk(t *testing.T) *corev1.Pod {
	t.Helper()
	core, size := r.client.CoreV1(), corev1.ResourceList{corev1.ResourceStorage: quantity("1Gi")}
	modes := []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}
	class := ""
	claims := core.PersistentVolumeClaims("default")
	bound := check.Value(claims.Create(t.Context(), &corev1.PersistentVolumeClaim{ObjectMeta: named("data"), Spec: corev1.PersistentVolumeClaimSpec{
		AccessModes: modes, Resources: corev1.VolumeResourceRequirements{Requests: size}, VolumeName: "disk", StorageClassName: &class,
	}}, metav1.CreateOptions{}))(t)
	bound.Status.Phase = corev1.ClaimBound
	check.Must(t, check.Err(claims.UpdateStatus(t.Context(), bound, metav1.UpdateOptions{})))
	check.Must(t, check.Err(core.PersistentVolumes().Create(t.Context(), &corev1.PersistentVolume{ObjectMeta: named("disk"), Spec: corev1.PersistentVolumeSpec{
		Capacity: size, AccessModes: modes, ClaimRef: &corev1.ObjectReference{Namespace: "default", Name: "data", UID: bound.UID},
		PersistentVolumeSource: corev1.PersistentVolumeSource{
			CSI: &corev1.CSIPersistentVolumeSource{Driver: diskDriver, VolumeHandle: "vol-1"},
		},
	}}, metav1.CreateOptions{})))
	p := pod("crust", claim("data"))
	p.Spec.NodeName = "node-a"
	return check.Value(core.Pods("default").Create(t.Context(), p, metav1.CreateOptions{}))(t)
}

func hasNoMore(t *testing.T, access string) {
	t.Helper()
	config := check.Value(clientcmd.BuildConfigFromFlags("", access))(t)
	client := check.Value(kubernetes.NewForConfig(config))(t)
	ctx := t.Context()
	for what, err := range map[string]error{
		"list secrets": check.Err(client.CoreV1().Secrets("default").List(ctx, metav1.ListOptions{})),
		"list claims":  check.Err(client.CoreV1().PersistentVolumeClaims("default").List(ctx, metav1.ListOptions{})),
		"list nodes":   check.Err(client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})),
		"create a pod": check.Err(client.CoreV1().Pods("default").Create(ctx, pod(""), keepNone)),
		"change a runtime class": check.Err(client.NodeV1().RuntimeClasses().Update(ctx,
			&nodev1.RuntimeClass{ObjectMeta: named("crust"), Handler: "runc"}, metav1.UpdateOptions{})),
	} {
		check.That(t, apierrors.IsForbidden(err), "it may %s: %v", what, err)
	}
}
