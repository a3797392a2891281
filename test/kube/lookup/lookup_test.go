//go:build system

package lookup

import (
	"crypto/sha256"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/decision"
	"github.com/crust-proxy/crust-proxy/internal/ground/apiserver"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// hasty is for what must not come. A get may take longer, so errors of gets are
// awaited.
const hasty = 300 * time.Millisecond

func TestKubeletsIdentityIsEnough(t *testing.T) {
	r := start(t)
	r.claim("data", nil)
	r.claim("raw", nil)
	r.claim("theirs", nil)
	group, policy, class := int64(2000), corev1.FSGroupChangeOnRootMismatch, "kata"
	pod := r.pod(node, "web-0", func(spec *corev1.PodSpec) {
		spec.RuntimeClassName = &class
		spec.SecurityContext = &corev1.PodSecurityContext{FSGroup: &group, FSGroupChangePolicy: &policy}
		main := &spec.Containers[0]
		main.VolumeMounts = []corev1.VolumeMount{
			{Name: "data", MountPath: "/data", SubPath: "sub"}, {Name: "scratch", MountPath: "/scratch"},
			{Name: "inline", MountPath: "/inline", ReadOnly: true},
		}
		main.VolumeDevices = []corev1.VolumeDevice{{Name: "raw", DevicePath: "/dev/raw"}}
		spec.Volumes = append(spec.Volumes,
			corev1.Volume{Name: "scratch", VolumeSource: corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{
				VolumeClaimTemplate: &corev1.PersistentVolumeClaimTemplate{Spec: r.unbound("template", nil).Spec},
			}}},
			corev1.Volume{Name: "inline", VolumeSource: corev1.VolumeSource{CSI: &corev1.CSIVolumeSource{Driver: driver}}})
	}, "data", "raw")
	r.claim("web-0-scratch", pod)
	stranger := r.pod(other, "stranger", nil, "theirs")

	c := r.follow(r.nodes(), node, patient)
	uid := string(pod.UID)
	want := decision.Pod{
		UID: uid, Namespace: space, Name: "web-0", RuntimeHandler: "kata-qemu", FSGroup: "2000", FSGroupPolicy: volume.GroupOnMismatch,
		Volumes: []decision.PodVolume{
			{Name: "data", Driver: driver, VolumeID: "vol-data", SubPaths: []string{"sub"}, Together: []string{"main"}, Mounts: []string{"main"}},
			{Name: "raw", Driver: driver, VolumeID: "vol-raw", Block: true, Mounts: []string{"main"}},
			{Name: "scratch", Driver: driver, VolumeID: "vol-web-0-scratch", Together: []string{"main"}, Mounts: []string{"main"}},
			{Name: "inline", Driver: driver, VolumeID: fmt.Sprintf("csi-%x", sha256.Sum256([]byte(uid+"inline"))), ReadOnlyMounts: true, Together: []string{"main"}, Mounts: []string{"main"}},
		},
	}
	if diff := cmp.Diff(want, known(t, c, uid)); diff != "" {
		t.Error(diff)
	}
	hasDriver(t, c)
	for _, id := range []string{"vol-data", "vol-raw", "vol-web-0-scratch"} {
		if got := users(t, c, id); !slices.Equal(got, []string{"web-0"}) {
			t.Errorf("%s: %v", id, got)
		}
	}
	for _, one := range apiserver.Try(t.Context(), apiserver.Identity{Kubeconfig: r.nodes()}, node) {
		if one.Err != nil {
			t.Errorf("%s: %v", one.What, one.Err)
		}
	}
	unknown := r.follow(r.nodes(), node, hasty)
	check.Eventually(t, "all is known", func() bool { return unknown.Problem() == nil })
	_, err := unknown.ByUID(t.Context(), string(stranger.UID))
	wantRefusal(t, err, volume.Busy, "not known on node "+node)
	_, err = unknown.Using(t.Context(), driver, "vol-theirs")
	wantRefusal(t, err, volume.Busy, "vol-theirs")
	r.nothingMoreIsGranted()
}

func wantRefusal(t *testing.T, err error, kind volume.Kind, words ...string) {
	t.Helper()
	if err == nil || volume.KindOf(err) != kind {
		t.Errorf("got %v, want one of kind %v", err, kind)
		return
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("%q does not say %q", err, word)
		}
	}
}

// nothingMoreIsGranted: what this node's identity may do is what the Node
// authorizer gives to every kubelet.
func (r *rig) nothingMoreIsGranted() {
	r.t.Helper()
	bindings, err := r.Client.RbacV1().ClusterRoleBindings().List(r.t.Context(), metav1.ListOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
	for _, binding := range bindings.Items {
		for _, subject := range binding.Subjects {
			if subject.Name == "system:nodes" || strings.HasPrefix(subject.Name, "system:node:") {
				r.t.Errorf("%s gives %s to %s", binding.Name, binding.RoleRef.Name, subject.Name)
			}
		}
	}
	config, err := clientcmd.BuildConfigFromFlags("", r.nodes())
	if err != nil {
		r.t.Fatal(err)
	}
	own, err := kubernetes.NewForConfig(config)
	if err != nil {
		r.t.Fatal(err)
	}
	ctx, claims := r.t.Context(), own.CoreV1().PersistentVolumeClaims(space)
	_, listed := claims.List(ctx, metav1.ListOptions{})
	_, watched := claims.Watch(ctx, metav1.ListOptions{})
	_, foreign := claims.Get(ctx, "theirs", metav1.GetOptions{})
	_, volume := own.CoreV1().PersistentVolumes().Get(ctx, "pv-theirs", metav1.GetOptions{})
	_, secrets := own.CoreV1().Secrets(space).List(ctx, metav1.ListOptions{})
	_, all := own.CoreV1().Pods("").List(ctx, metav1.ListOptions{})
	for what, err := range map[string]error{
		"lists claims": listed, "watches claims": watched, "gets another node's claim": foreign, "gets another node's volume": volume,
		"lists secrets": secrets, "lists all pods": all,
	} {
		if !apierrors.IsForbidden(err) {
			r.t.Errorf("a node %s: %v", what, err)
		}
	}
}

func TestAnotherNodesNameIsNotTaken(t *testing.T) {
	r := start(t)
	c := r.follow(r.nodes(), other, hasty)
	check.Eventually(t, "the refusal is seen", func() bool { return len(c.State().Problems) > 0 })
	_, err := c.ByUID(t.Context(), "any")
	wantRefusal(t, err, volume.Timeout, "does not allow it", `is "node-b" this node's name`)
	failed := slices.ContainsFunc(apiserver.Try(t.Context(), apiserver.Identity{Kubeconfig: r.nodes()}, other), func(one apiserver.Trial) bool {
		return one.Err != nil && strings.Contains(one.What, "the pods of node "+other)
	})
	if !failed {
		t.Error("a trial by another node's name finds nothing wrong")
	}
}
