//go:build system

package lookup

import (
	"context"
	"testing"
	"time"

	"go.uber.org/zap/zaptest"
	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/decision"
	lookup "github.com/crust-proxy/crust-proxy/internal/front/pods"
	"github.com/crust-proxy/crust-proxy/internal/ground/apiserver"
	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
)

const (
	node   = "node-a"
	other  = "node-b"
	driver = "disk.example.com"
	space  = metav1.NamespaceDefault
)

// patient is for what must come; it is never waited out.
const patient = time.Minute

type rig struct {
	*cluster.ControlPlane
	t *testing.T
}

// start starts a control plane with two nodes, a runtime class and a driver.
func start(t *testing.T) *rig {
	t.Helper()
	r := &rig{cluster.StartControlPlane(t), t}
	for _, name := range []string{node, other} {
		made(r, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, r.Client.CoreV1().Nodes().Create)
	}
	made(r, &nodev1.RuntimeClass{ObjectMeta: metav1.ObjectMeta{Name: "kata"}, Handler: "kata-qemu"}, r.Client.NodeV1().RuntimeClasses().Create)
	made(r, &storagev1.CSINode{
		ObjectMeta: metav1.ObjectMeta{Name: node},
		Spec:       storagev1.CSINodeSpec{Drivers: []storagev1.CSINodeDriver{{Name: driver, NodeID: node}}},
	}, r.Client.StorageV1().CSINodes().Create)
	policy := storagev1.FileFSGroupPolicy
	made(r, &storagev1.CSIDriver{
		ObjectMeta: metav1.ObjectMeta{Name: driver},
		Spec: storagev1.CSIDriverSpec{FSGroupPolicy: &policy, VolumeLifecycleModes: []storagev1.VolumeLifecycleMode{
			storagev1.VolumeLifecyclePersistent, storagev1.VolumeLifecycleEphemeral,
		}},
	}, r.Client.StorageV1().CSIDrivers().Create)
	return r
}

// made makes an object.
func made[T any](r *rig, object T, create func(context.Context, T, metav1.CreateOptions) (T, error)) T {
	r.t.Helper()
	out, err := create(r.t.Context(), object, metav1.CreateOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
	return out
}

// follow runs a look-up by an identity until the test ends.
func (r *rig) follow(kubeconfig, as string, patience time.Duration) *lookup.Cluster {
	r.t.Helper()
	c := lookup.New(lookup.Config{
		Identity: apiserver.Identity{Kubeconfig: kubeconfig, UserAgent: "lookup-test"}, NodeName: as, Patience: patience, Log: zaptest.NewLogger(r.t),
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	r.t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			r.t.Error(err)
		}
	})
	return c
}

// nodes gives the identity of this node's kubelet.
func (r *rig) nodes() string {
	r.t.Helper()
	return r.NodeKubeconfig(node)
}

// claim makes a claim that is bound to a volume of the driver, as the controllers
// would leave it. Its id is "vol-" and its name.
func (r *rig) claim(name string, owner *corev1.Pod) {
	r.t.Helper()
	claim := r.unbound(name, owner)
	class := ""
	pv := made(r, &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: "pv-" + name},
		Spec: corev1.PersistentVolumeSpec{
			Capacity: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}, AccessModes: claim.Spec.AccessModes,
			ClaimRef:         &corev1.ObjectReference{Namespace: space, Name: name, UID: claim.UID},
			StorageClassName: class,
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{
				Driver: driver, VolumeHandle: "vol-" + name, FSType: "ext4",
			}},
		},
	}, r.Client.CoreV1().PersistentVolumes().Create)
	claims := r.Client.CoreV1().PersistentVolumeClaims(space)
	claim.Spec.VolumeName = pv.Name
	claim, err := claims.Update(r.t.Context(), claim, metav1.UpdateOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
	claim.Status.Phase = corev1.ClaimBound
	if _, err := claims.UpdateStatus(r.t.Context(), claim, metav1.UpdateOptions{}); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) unbound(name string, owner *corev1.Pod) *corev1.PersistentVolumeClaim {
	r.t.Helper()
	class := ""
	claim := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, StorageClassName: &class,
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}},
		},
	}
	if owner != nil {
		claim.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(owner, corev1.SchemeGroupVersion.WithKind("Pod"))}
	}
	return made(r, claim, r.Client.CoreV1().PersistentVolumeClaims(space).Create)
}

// pod makes a pod of a node that mounts each of the claims, as the volume of the
// same name.
func (r *rig) pod(on, name string, change func(*corev1.PodSpec), claims ...string) *corev1.Pod {
	r.t.Helper()
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PodSpec{
		NodeName: on, Containers: []corev1.Container{{Name: "main", Image: "none"}},
	}}
	main := &p.Spec.Containers[0]
	for _, claim := range claims {
		p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: claim, VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim},
		}})
		main.VolumeMounts = append(main.VolumeMounts, corev1.VolumeMount{Name: claim, MountPath: "/" + claim})
	}
	if change != nil {
		change(&p.Spec)
	}
	return made(r, p, r.Client.CoreV1().Pods(space).Create)
}

// known gives what is told of a pod.
func known(t *testing.T, c *lookup.Cluster, uid string) decision.Pod {
	t.Helper()
	p, err := c.ByUID(t.Context(), uid)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// hasDriver wants the driver to be read from this node's CSINode.
func hasDriver(t *testing.T, c *lookup.Cluster) {
	t.Helper()
	if got, err := c.NodeDrivers(t.Context()); err != nil || len(got) != 1 || !got[driver] {
		t.Errorf("the CSINode's drivers: %v, %v", got, err)
	}
}

// users names the pods that want a volume.
func users(t *testing.T, c *lookup.Cluster, id string) []string {
	t.Helper()
	pods, err := c.Using(t.Context(), driver, id)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, p := range pods {
		out = append(out, p.Name)
	}
	return out
}
