package pods

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap/zaptest"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/decision"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/internal/ground/apiserver"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// unknownOf gives what is said of a volume that is not known.
func unknownOf(t *testing.T, p decision.Pod, name string) error {
	t.Helper()
	for _, v := range p.Volumes {
		if v.Name == name {
			check.That(t, v.Unknown == nil || v.Driver == "" && v.VolumeID == "", "unknown and named: %+v", v)
			return v.Unknown
		}
	}
	t.Fatalf("no volume %s in %+v", name, p)
	return nil
}

func TestAClaimThatIsBoundLate(t *testing.T) {
	f := newFakeAPI(t, "data")
	f.put(unbound("late"), aPod("a", "data", "late"))
	c := startSynced(t, f, hasty)
	eventually(t, c, "the other volume is known", func() bool {
		return unknownOf(t, check.Value(c.ByUID(t.Context(), "uid-a"))(t), "data") == nil
	})
	refusedInTheEnd(t, c, func() error {
		return unknownOf(t, check.Value(c.ByUID(t.Context(), "uid-a"))(t), "late")
	}, volume.Busy, "default/late", "not bound")
	using := func() error { return check.Err(c.Using(t.Context(), driver, "vol-late")) }
	refusedInTheEnd(t, c, using, volume.Busy, "vol-late", "default/late", "not bound")
	f.putBound("late")
	eventually(t, c, "the claim is bound", func() bool {
		pods, err := c.Using(t.Context(), driver, "vol-late")
		return err == nil && len(pods) == 1 && pods[0].Name == "a"
	})
	got := check.Value(c.ByUID(t.Context(), "uid-a"))(t)
	check.That(t, unknownOf(t, got, "late") == nil, "got %+v", got)
}

// TestLookupsDoNotWaitForPrefetching, which begins late; what it cannot learn again and again is said of the pod.
func TestLookupsDoNotWaitForPrefetching(t *testing.T) {
	f := newFakeAPI(t, "data")
	f.put(aPod("a", "data"), aPod("b", "data"))
	c := New(Config{Identity: apiserver.Identity{Kubeconfig: f.kubeconfig()}, NodeName: thisNode, Patience: patient, Log: zaptest.NewLogger(t)})
	check.That(t, c.prefetch.spread > 0, "all nodes begin at once")
	c.prefetch.spread = 1000 * time.Hour
	check.Running(t, c.Run)
	synced(t, c)
	got := check.Value(c.ByUID(t.Context(), "uid-a"))(t)
	check.That(t, unknownOf(t, got, "data") == nil && c.State().Incomplete == 1 && len(c.State().Unknown) == 0, "got %+v, %+v", got, c.State())
	for range 5 {
		c.prefetch.tried.note("uid-b", errNoAnswer)
	}
	check.Equal(t, strings.Join(c.State().Unknown, ""), "pod default/b: "+errNoAnswer.Error(), "why")
}

func TestClaimsAreAskedForOnceInAPodsLife(t *testing.T) {
	f := newFakeAPI(t, "data")
	f.put(aPod("a", "data"))
	c := start(t, f, patient)
	for range 3 {
		check.Value(c.ByUID(t.Context(), "uid-a"))(t)
		usersOf(t, c, "vol-data")
	}
	changed := aPod("a", "data")
	changed.Annotations = map[string]string{policy.AnnotationKey: "*"}
	f.put(changed)
	eventually(t, c, "the change is seen", func() bool { return check.Value(c.ByUID(t.Context(), "uid-a"))(t).Asks == "*" })
	f.forget() // all is listed anew
	f.put(aPod("b"))
	eventually(t, c, "the new list is seen", func() bool { return c.State().Pods == 2 })
	check.Value(c.ByUID(t.Context(), "uid-a"))(t)
	k, _ := c.pods.find("uid-a")
	failed := c.resolver.learn(t.Context(), known{pod: k.pod}) // a caller who read the pod before the claim was known
	n := f.count("get persistentvolumeclaimsdefault/data")
	check.That(t, n == 1 && len(failed) == 0, "the claim was asked for %d times: %v", n, failed)
}

// TestAPodMadeAnewIsLearnedAnew: a stateful set's pod comes again under its name.
func TestAPodMadeAnewIsLearnedAnew(t *testing.T) {
	f := newFakeAPI(t, "data")
	f.put(aPod("web-0", "data"))
	c := start(t, f, patient)
	check.Value(c.ByUID(t.Context(), "uid-web-0"))(t)
	f.remove(aPod("web-0"))
	pvc, pv := bound("data")
	pvc.UID, pv.Spec.ClaimRef.UID, pv.Spec.CSI.VolumeHandle = "another", "another", "vol-2"
	again := aPod("web-0", "data")
	again.UID = "uid-again"
	f.put(pvc, pv, again)
	got := check.Value(c.ByUID(t.Context(), "uid-again"))(t)
	check.That(t, got.Volumes[0].VolumeID == "vol-2", "got %+v", got)
	eventually(t, c, "the old one is gone", func() bool { return c.State().Pods == 1 })
}

func TestThoseWhoAskAtOnceShareOneGet(t *testing.T) {
	f := newFakeAPI(t, "data")
	release := f.holdGets("persistentvolumeclaims")
	f.put(aPod("a", "data"), aPod("b", "data"))
	c := startSynced(t, f, patient)
	const claim = "get persistentvolumeclaimsdefault/data"
	eventually(t, c, "the claim is asked for", func() bool { return f.count(claim) > 0 })
	var asking sync.WaitGroup
	for range 5 {
		asking.Go(func() { usersOf(t, c, "vol-data") })
		asking.Go(func() { check.Value(c.ByUID(t.Context(), "uid-b"))(t) })
	}
	release()
	asking.Wait()
	n := f.count(claim) // one for each pod, at most
	check.That(t, n <= 2, "the claim was asked for %d times", n)
}

// TestAGetThatHangsHoldsUpNobody: who asks gets an answer in his own time.
func TestAGetThatHangsHoldsUpNobody(t *testing.T) {
	f := newFakeAPI(t, "data")
	release := f.holdGets("persistentvolumes")
	defer release()
	f.put(aPod("a", "data"), aPod("plain"))
	c := startSynced(t, f, hasty)
	using := func() error { return check.Err(c.Using(t.Context(), driver, "vol-data")) }
	refusedInTheEnd(t, c, using, volume.Timeout, "default/data", "did not answer in time")
	byUID := func() error { return unknownOf(t, check.Value(c.ByUID(t.Context(), "uid-a"))(t), "data") }
	refusedInTheEnd(t, c, byUID, volume.Timeout)
	check.Value(c.ByUID(t.Context(), "uid-plain"))(t)
}

// TestACredentialProgramThatHangs holds up nobody, and nothing once there is another kubeconfig.
func TestACredentialProgramThatHangs(t *testing.T) {
	f := newFakeAPI(t, "data")
	f.put(aPod("a", "data"))
	kubeconfig, fifo := f.kubeconfig(), t.TempDir()+"/fifo"
	good := check.Value(os.ReadFile(kubeconfig))(t) //nolint:gosec // our own
	check.Must(t, unix.Mkfifo(fifo, 0o600))
	silent := check.Value(os.OpenFile(fifo, os.O_RDWR, 0))(t) //nolint:gosec // our own
	t.Cleanup(func() { check.Must(t, os.Remove(fifo)); check.Must(t, silent.Close()) })
	program := fmt.Sprintf("{exec: {apiVersion: client.authentication.k8s.io/v1, interactiveMode: Never, command: cat, args: [%q]}}", fifo)
	hangs := strings.NewReplacer("{token: t}", program, "http:", "https:").Replace(string(good)) // plain HTTP has no credentials
	check.Must(t, os.WriteFile(kubeconfig, []byte(hangs), 0o600))
	c := startWith(t, kubeconfig, hasty)
	eventually(t, c, "it is asked", func() bool { return c.server.client.Load() != nil })
	for range 2 * requestsAtOnce {
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		check.Fails(t, check.Err(c.NodeDrivers(ctx)))
		cancel()
	}
	check.Must(t, os.WriteFile(kubeconfig, good, 0o600))
	synced(t, c)
	eventually(t, c, "the claim is known", func() bool { of, err := c.Using(t.Context(), driver, "vol-data"); return err == nil && len(of) == 1 })
}

func TestVolumesThatAreNotThePods(t *testing.T) {
	yes := true
	pod := []metav1.OwnerReference{{Kind: "Pod", Name: "a", UID: "uid-other", Controller: &yes}}
	cases := map[string]struct {
		change func(f *fakeAPI, p *corev1.Pod)
		want   []string
	}{
		"another pod's own": {func(f *fakeAPI, p *corev1.Pod) {
			pvc, pv := bound("a-data")
			pvc.OwnerReferences = pod
			f.put(pvc, pv)
			p.Spec.Volumes[0].VolumeSource = corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{}}
		}, []string{"default/a-data", "not made for the pod"}},
		"nobody's own": {func(f *fakeAPI, p *corev1.Pod) {
			f.putBound("a-data")
			p.Spec.Volumes[0].VolumeSource = corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{}}
		}, []string{"default/a-data", "not made for the pod"}},
		"the volume names another claim": {func(f *fakeAPI, _ *corev1.Pod) {
			pvc, pv := bound("data")
			pv.Spec.ClaimRef.UID = "another"
			f.put(pvc, pv)
		}, []string{"default/data", "pv-data", "do not name each other"}},
		"no claim": {func(*fakeAPI, *corev1.Pod) {}, []string{"default/data", "does not exist"}},
		"no volume": {func(f *fakeAPI, _ *corev1.Pod) {
			pvc, _ := bound("data")
			f.put(pvc)
		}, []string{"pv-data", "default/data", "does not exist"}},
		"no right": {func(f *fakeAPI, _ *corev1.Pod) {
			f.putBound("data")
			f.setRefused("get persistentvolumeclaims", 403)
		}, []string{"default/data", "may not be read"}},
	}
	for name, one := range cases {
		t.Run(name, func(t *testing.T) {
			f := newFakeAPI(t)
			p := aPod("a", "data")
			one.change(f, p)
			f.put(p)
			c := startSynced(t, f, hasty)
			refusedInTheEnd(t, c, func() error {
				return unknownOf(t, check.Value(c.ByUID(t.Context(), "uid-a"))(t), "data")
			}, volume.Busy, one.want...)
			using := func() error { return check.Err(c.Using(t.Context(), driver, "vol-data")) }
			refusedInTheEnd(t, c, using, volume.Busy, one.want...)
		})
	}
}

func TestVolumesOfFormerKindsAreTheirDrivers(t *testing.T) {
	f := newFakeAPI(t)
	pvc, pv := bound("disk")
	pv.Spec.CSI = nil
	pv.Spec.AWSElasticBlockStore = &corev1.AWSElasticBlockStoreVolumeSource{VolumeID: "aws://eu-1a/vol-0123", FSType: "ext4"}
	share, sharePV := bound("share")
	sharePV.Spec.CSI = nil
	sharePV.Spec.NFS = &corev1.NFSVolumeSource{Server: "s", Path: "/"}
	p := aPod("a", "disk", "share")
	p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: "in-pod", VolumeSource: corev1.VolumeSource{
		Cinder: &corev1.CinderVolumeSource{VolumeID: "c-1", FSType: "xfs"},
	}}, corev1.Volume{Name: "panics", VolumeSource: corev1.VolumeSource{ // in the library
		VsphereVolume: &corev1.VsphereVirtualDiskVolumeSource{VolumePath: "v", StoragePolicyName: "p"},
	}})
	f.put(pvc, pv, share, sharePV, p)
	got := check.Value(start(t, f, patient).ByUID(t.Context(), "uid-a"))(t)
	check.That(t, len(got.Volumes) == 2 && got.Volumes[0].Driver == "ebs.csi.aws.com" && got.Volumes[0].VolumeID == "vol-0123" &&
		got.Volumes[1].Driver == "cinder.csi.openstack.org" && got.Volumes[1].VolumeID == "c-1", "got %+v", got.Volumes)
}

func TestStaticPodsAreKnownByKubeletsUID(t *testing.T) {
	mirror := func(name, hash string) *corev1.Pod {
		p := aPod(name)
		p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: hash, hashAnnotation: hash}
		p.OwnerReferences = []metav1.OwnerReference{{Kind: "Node", Name: thisNode}}
		p.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{CSI: &corev1.CSIVolumeSource{Driver: driver}}}}
		return p
	}
	const hash = "5d41402abc4b2a76b9719d911017c592"
	f := newFakeAPI(t)
	orphan := mirror("orphan", "aaaa402abc4b2a76b9719d911017c592")
	orphan.OwnerReferences = nil
	victim := "1b4e28ba-2fa1-11d2-883f-0016d3cca427"
	f.put(mirror("static", hash), orphan, mirror("liar", victim), mirror("twin-a", "twins"), mirror("twin-b", "twins"))
	c := startSynced(t, f, hasty)
	got := check.Value(c.ByUID(t.Context(), hash))(t)
	check.That(t, got.Name == "static" && got.UID == hash && got.Volumes[0].VolumeID == inlineID(hash, "v"), "got %+v", got)
	check.Value(c.ByUID(t.Context(), "uid-static"))(t)
	for _, uid := range []string{victim, "aaaa402abc4b2a76b9719d911017c592", "twins"} {
		check.Kind(t, check.Err(c.ByUID(t.Context(), uid)), volume.Busy, uid)
	}
}

func TestPodsOfAnotherNodeAreNotTaken(t *testing.T) {
	f := newFakeAPI(t, "data")
	stranger := aPod("stranger", "data")
	stranger.Spec.NodeName = "node-2"
	f.put(stranger)
	c := startSynced(t, f, hasty)
	changed := aPod("here", "data")
	f.put(changed)
	eventually(t, c, "the node's own is known", func() bool { s := c.State(); return s.Pods == 1 && s.Incomplete == 0 })
	check.Kind(t, check.Err(c.ByUID(t.Context(), "uid-stranger")), volume.Busy, "uid-stranger")
	users := usersOf(t, c, "vol-data")
	check.That(t, slices.Equal(users, []string{"here"}), "using: %v", users)
}

func TestHostileTextIsBounded(t *testing.T) {
	f := newFakeAPI(t)
	p := aPod("a", "data")
	p.Annotations = map[string]string{policy.AnnotationKey: strings.Repeat("data,", 50_000)}
	for range 1000 {
		c := &p.Spec.Containers[0]
		c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: "data", SubPath: strings.Repeat("é", 500+len(c.VolumeMounts))})
	}
	for _, name := range numbered("c", 1000) {
		p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: name, VolumeMounts: []corev1.VolumeMount{{Name: "data", MountPath: "/ "}}})
	}
	for _, name := range numbered("more", 1000) {
		p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{
			CSI: &corev1.CSIVolumeSource{Driver: driver},
		}})
	}
	f.put(p)
	got := check.Value(start(t, f, patient).ByUID(t.Context(), "uid-a"))(t)
	_, err := policy.ParseAnnotation(got.Asks)
	check.That(t, err != nil && len(got.Asks) <= policy.MaxAnnotation+8, "%d bytes of the annotation", len(got.Asks))
	check.That(t, len(got.Volumes) == maxVolumes && got.MoreVolumes, "%d volumes", len(got.Volumes))
	v := got.Volumes[0]
	check.That(t, len(v.Together) == maxSubPaths && len(v.Spaced) == maxSubPaths && len(v.Mounts) == 2*maxSubPaths,
		"%d and %d containers, %d mounts", len(v.Together), len(v.Spaced), len(v.Mounts))
	paths := got.Volumes[0].SubPaths
	check.That(t, len(paths) != 0 && len(paths) <= maxSubPaths && len(paths[0]) <= maxSubPath && !strings.ContainsRune(paths[0], '\uFFFD'),
		"%d subPaths", len(paths))
	long := apiserver.Clipped(errors.New(strings.Repeat("x", 10_000)))
	check.That(t, len(long.Error()) <= 300+8, "%d bytes of an error", len(long.Error()))
}
