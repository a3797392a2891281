package pods

import (
	"fmt"
	"os"
	"runtime"
	"testing"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap/zaptest"
	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/flowcontrol"

	"github.com/crust-proxy/crust-proxy/internal/ground/apiserver"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestMain looks for goroutines that were left. Those of client-go that watch a
// certificate end when the garbage collector takes their transport.
func TestMain(m *testing.M) {
	code := m.Run()
	var left error
	for range 10 {
		runtime.GC()
		if left = goleak.Find(); left == nil {
			break
		}
	}
	if left != nil && code == 0 {
		fmt.Fprintln(os.Stderr, left)
		code = 1
	}
	os.Exit(code)
}

const (
	thisNode = "node-1"
	driver   = "disk.example.com"
)

// patient is for what must come; it is never waited out. Hasty is for what must not.
const (
	patient = 30 * time.Second
	hasty   = 50 * time.Millisecond
)

// start runs a Cluster until the test ends.
func start(t *testing.T, f *fakeAPI, patience time.Duration) *Cluster {
	t.Helper()
	return startWith(t, f.kubeconfig(), patience)
}

// startSynced waits until the Cluster knows everything.
func startSynced(t *testing.T, f *fakeAPI, patience time.Duration) *Cluster {
	t.Helper()
	c := start(t, f, patience)
	synced(t, c)
	return c
}

func startWith(t *testing.T, kubeconfig string, patience time.Duration) *Cluster {
	t.Helper()
	c := New(Config{Identity: apiserver.Identity{Kubeconfig: kubeconfig}, NodeName: thisNode, Patience: patience, Log: zaptest.NewLogger(t)})
	c.recheck = 10 * time.Millisecond
	c.prefetch.spread, c.prefetch.rate = 0, flowcontrol.NewTokenBucketRateLimiter(50, 100)
	c.backoff = wait.Backoff{Duration: 10 * time.Millisecond, Factor: 2, Steps: 3, Cap: 50 * time.Millisecond}
	check.Running(t, c.Run)
	return c
}

// eventually waits for what a watch brings. It looks at each change of what is
// known, and now and then for what changes without one.
func eventually(t *testing.T, c *Cluster, what string, is func() bool) {
	t.Helper()
	deadline := time.After(patient)
	for {
		changed := c.changes.wait()
		if is() {
			return
		}
		select {
		case <-changed:
		case <-time.After(10 * time.Millisecond):
		case <-deadline:
			t.Fatalf("it did not come about: %s", what)
		}
	}
}

func synced(t *testing.T, c *Cluster) {
	t.Helper()
	eventually(t, c, "everything is known", func() bool { return c.Problem() == nil })
}

// usersOf names the pods that want a volume.
func usersOf(t *testing.T, c *Cluster, id string) []string {
	t.Helper()
	pods := check.Value(c.Using(t.Context(), driver, id))(t)
	var out []string
	for _, p := range pods {
		out = append(out, p.Name)
	}
	return out
}

var born = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// aPod mounts each of the claims, as the volume of the same name.
func aPod(name string, claims ...string) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: name, UID: types.UID("uid-" + name), CreationTimestamp: metav1.NewTime(born),
		},
		Spec: corev1.PodSpec{NodeName: thisNode, Containers: []corev1.Container{{Name: "main"}}},
	}
	for _, claim := range claims {
		p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: claim, VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim},
		}})
		mount(p, claim)
	}
	return p
}

func mount(p *corev1.Pod, volume string) {
	c := &p.Spec.Containers[0]
	c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: volume, MountPath: "/" + volume})
}

func ofClass(p *corev1.Pod, class string) *corev1.Pod {
	p.Spec.RuntimeClassName = &class
	return p
}

// bound is a claim and its volume, whose id is "vol-" and the claim's name.
func bound(claim string) (*corev1.PersistentVolumeClaim, *corev1.PersistentVolume) {
	pvc := unbound(claim)
	pvc.Spec.VolumeName, pvc.Status.Phase = "pv-"+claim, corev1.ClaimBound
	pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv-" + claim}}
	pv.Spec.ClaimRef = &corev1.ObjectReference{Namespace: "default", Name: claim, UID: pvc.UID}
	pv.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}
	pv.Spec.StorageClassName = "class-of-" + claim
	pv.Spec.CSI = &corev1.CSIPersistentVolumeSource{Driver: driver, VolumeHandle: "vol-" + claim, FSType: "ext4"}
	return pvc, pv
}

func unbound(claim string) *corev1.PersistentVolumeClaim {
	pvc := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: claim, UID: types.UID("uid-of-" + claim)}}
	pvc.Status.Phase = corev1.ClaimPending
	return pvc
}

func (f *fakeAPI) putBound(claims ...string) {
	for _, claim := range claims {
		pvc, pv := bound(claim)
		f.put(pvc, pv)
	}
}

func class(name, handler string) *nodev1.RuntimeClass {
	return &nodev1.RuntimeClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Handler: handler}
}

func csiDriver(policy storagev1.FSGroupPolicy) *storagev1.CSIDriver {
	d := &storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: driver}}
	if policy != "" {
		d.Spec.FSGroupPolicy = &policy
	}
	return d
}

func numbered(name string, n int) []string {
	var out []string
	for i := range n {
		out = append(out, fmt.Sprintf("%s-%03d", name, i))
	}
	return out
}
