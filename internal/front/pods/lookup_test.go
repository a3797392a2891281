package pods

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/decision"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/internal/ground/apiserver"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestAllThatIsToldOfAPod(t *testing.T) {
	f := newFakeAPI(t)
	f.put(class("kata-fast", "kata-qemu"), csiDriver(storagev1.FileFSGroupPolicy))
	f.putBound("data", "logs", "raw", "web-0-scratch", "idle")
	scratch, _ := bound("web-0-scratch")
	yes := true
	scratch.OwnerReferences = []metav1.OwnerReference{{Kind: "Pod", Name: "web-0", UID: "uid-web-0", Controller: &yes}}
	f.put(scratch)

	p := ofClass(aPod("web-0", "data", "raw", "logs"), "kata-fast")
	group, change := int64(2000), corev1.FSGroupChangeOnRootMismatch
	p.Spec.SecurityContext = &corev1.PodSecurityContext{FSGroup: &group, FSGroupChangePolicy: &change}
	p.Annotations = map[string]string{policy.AnnotationKey: "data, logs"}
	main := &p.Spec.Containers[0]
	main.Name = "app"
	main.VolumeMounts = []corev1.VolumeMount{
		{Name: "data", MountPath: "/a b/c", SubPath: "a/b"}, {Name: "data", SubPath: "a/b"}, {Name: "logs", ReadOnly: true}, {Name: "scratch"}, {Name: "tokens"},
	}
	main.VolumeDevices = []corev1.VolumeDevice{{Name: "raw", DevicePath: "/dev/x"}}
	always := corev1.ContainerRestartPolicyAlways
	p.Spec.InitContainers = []corev1.Container{
		{Name: "setup", VolumeMounts: []corev1.VolumeMount{{Name: "data", MountPath: "/my data/", SubPathExpr: "$(POD)", ReadOnly: true}, {Name: "data", ReadOnly: true}}},
		{Name: "sidecar", RestartPolicy: &always, VolumeMounts: []corev1.VolumeMount{{Name: "data", ReadOnly: true}}},
	}
	p.Spec.EphemeralContainers = []corev1.EphemeralContainer{{EphemeralContainerCommon: corev1.EphemeralContainerCommon{
		Name: "debug", VolumeMounts: []corev1.VolumeMount{{Name: "inline"}},
	}}}
	p.Spec.Volumes[2].PersistentVolumeClaim.ReadOnly = true
	p.Spec.Volumes = append(p.Spec.Volumes,
		corev1.Volume{Name: "scratch", VolumeSource: corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{}}},
		corev1.Volume{Name: "tokens", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{}}},
		corev1.Volume{Name: "inline", VolumeSource: corev1.VolumeSource{CSI: &corev1.CSIVolumeSource{Driver: driver}}},
		corev1.Volume{Name: "idle", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "idle"}}},
	)
	f.put(p)

	c := start(t, f, patient)
	got := check.Value(c.ByUID(t.Context(), "uid-web-0"))(t)
	want := decision.Pod{
		UID: "uid-web-0", Namespace: "default", Name: "web-0", RuntimeHandler: "kata-qemu", FSGroup: "2000",
		FSGroupPolicy: volume.GroupOnMismatch, Asks: "data, logs",
		Volumes: []decision.PodVolume{
			{Name: "data", Claim: "data", Driver: driver, VolumeID: "vol-data", StorageClass: "class-of-data", FSType: "ext4", AccessMode: "ReadWriteOnce", SubPaths: []string{"$(POD)", "a/b"}, Together: []string{"sidecar", "app"}, Spaced: []string{"setup"}, Mounts: []string{"setup", "setup", "sidecar", "app", "app"}},
			{Name: "raw", Claim: "raw", Driver: driver, VolumeID: "vol-raw", StorageClass: "class-of-raw", FSType: "ext4", AccessMode: "ReadWriteOnce", Block: true, Mounts: []string{"app"}},
			{Name: "logs", Claim: "logs", ReadOnly: true, Driver: driver, VolumeID: "vol-logs", StorageClass: "class-of-logs", FSType: "ext4", AccessMode: "ReadWriteOnce", Together: []string{"app"}, Mounts: []string{"app"}, ReadOnlyMounts: true, NoGroup: true},
			{Name: "scratch", Claim: "web-0-scratch", Driver: driver, VolumeID: "vol-web-0-scratch", StorageClass: "class-of-web-0-scratch", FSType: "ext4", AccessMode: "ReadWriteOnce", Together: []string{"app"}, Mounts: []string{"app"}},
			{Name: "inline", Driver: driver, VolumeID: fmt.Sprintf("csi-%x", sha256.Sum256([]byte("uid-web-0inline"))), Together: []string{"debug"}, Mounts: []string{"debug"}},
			{Name: "idle", Claim: "idle", Driver: driver, VolumeID: "vol-idle", StorageClass: "class-of-idle", FSType: "ext4", AccessMode: "ReadWriteOnce"},
		},
	}
	check.Same(t, cmp.Diff(want, got, cmpopts.EquateErrors()), "-want +got")
	check.Equal(t, f.selectorOf("pods"), "spec.nodeName="+thisNode, "pods were asked for by")
	users := usersOf(t, c, "vol-data")
	check.That(t, slices.Equal(users, []string{"web-0"}), "using: %v", users)
}

// refusedInTheEnd asks again until the error is what it comes to be: a get may take longer than a hasty question.
func refusedInTheEnd(t *testing.T, c *Cluster, ask func() error, kind volume.Kind, words ...string) {
	t.Helper()
	var err error
	eventually(t, c, "an error of kind "+kind.String(), func() bool {
		err = ask()
		return err != nil && volume.KindOf(err) == kind
	})
	check.Kind(t, err, kind, words...)
}

func TestAPodThatComesLateIsWaitedFor(t *testing.T) {
	f := newFakeAPI(t, "data")
	c := startSynced(t, f, patient)
	byUID := check.Begin(func() error { return check.Err(c.ByUID(t.Context(), "uid-late")) })
	using := check.Begin(func() error { return check.Err(c.Using(t.Context(), driver, "vol-data")) })
	f.put(aPod("late", "data"))
	check.Must(t, errors.Join(<-byUID, <-using))
}

func TestWhatDoesNotComeIsRefused(t *testing.T) {
	f := newFakeAPI(t, "data")
	idle := aPod("idle", "data")
	idle.Spec.Containers[0].VolumeMounts = nil // no container uses the volume
	f.put(idle)
	c := startSynced(t, f, hasty)
	check.Kind(t, check.Err(c.ByUID(t.Context(), "uid-nobody")), volume.Busy, "uid-nobody", thisNode)
	check.Kind(t, check.Err(c.ByUID(t.Context(), "")), volume.Busy)
	for id, says := range map[string]string{"vol-nobody": driver, "vol-data": "not known on node " + thisNode} {
		refusedInTheEnd(t, c, func() error { return check.Err(c.Using(t.Context(), driver, id)) }, volume.Busy, id, says)
	}
	check.Kind(t, check.Err(c.Using(t.Context(), "", "")), volume.Busy)
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	check.Kind(t, check.Err(c.ByUID(gone, "uid-nobody")), volume.Canceled, "uid-nobody")
}

func TestNothingIsKnownBeforeItRuns(t *testing.T) {
	c := New(Config{Identity: apiserver.Identity{Kubeconfig: "/does/not/exist"}, NodeName: thisNode, Patience: hasty, Log: zap.NewNop()})
	check.Kind(t, check.Err(c.ByUID(t.Context(), "uid-a")), volume.Timeout, "not told")
	check.That(t, c.Problem() != nil, "all is said to be known")
	check.Kind(t, check.Err(c.NodeDrivers(t.Context())), volume.Timeout, "no API server was asked yet")
}

func TestRuntimeClassIsNeverGuessed(t *testing.T) {
	f := newFakeAPI(t, "data")
	f.put(ofClass(aPod("a", "data"), "kata"), aPod("plain"))
	c := startSynced(t, f, hasty)
	check.Kind(t, check.Err(c.ByUID(t.Context(), "uid-a")), volume.Busy, "default/a", "runtime class kata", "does not exist")
	using := func() error { return check.Err(c.Using(t.Context(), driver, "vol-data")) }
	refusedInTheEnd(t, c, using, volume.Busy, "runtime class kata")
	p := check.Value(c.ByUID(t.Context(), "uid-plain"))(t)
	check.That(t, p.RuntimeHandler == "", "the default runtime is %q", p.RuntimeHandler)
	f.put(class("kata", "kata-clh"))
	eventually(t, c, "the class is known", func() bool { _, err := c.ByUID(t.Context(), "uid-a"); return err == nil })
	f.remove(class("kata", "kata-clh"))
	eventually(t, c, "the class is gone", func() bool { _, err := c.ByUID(t.Context(), "uid-a"); return err != nil })
}

// TestAPodWhoseClassIsMissingDoesNotHoldUpOthers: it cannot start anyway.
func TestAPodWhoseClassIsMissingDoesNotHoldUpOthers(t *testing.T) {
	f := newFakeAPI(t, "data")
	f.put(ofClass(aPod("a", "data"), "nowhere"), aPod("b", "data"))
	c := startSynced(t, f, patient)
	eventually(t, c, "both are learned", func() bool { return c.State().Incomplete == 0 })
	users := usersOf(t, c, "vol-data")
	check.That(t, slices.Equal(users, []string{"b"}), "using: %v", users)
}

func TestOrderOfThoseWhoWantAVolume(t *testing.T) {
	f := newFakeAPI(t, "data")
	now := metav1.NewTime(born.Add(time.Hour))
	young, old, dying, ended, still := aPod("a-young", "data"), aPod("old", "data"), aPod("dying", "data"), aPod("ended", "data"), aPod("still", "data")
	young.CreationTimestamp = now
	dying.CreationTimestamp.Time = born.Add(-time.Hour)
	dying.DeletionTimestamp = &now
	ended.Status.Phase = corev1.PodSucceeded
	still.Status = corev1.PodStatus{Phase: corev1.PodFailed, ContainerStatuses: []corev1.ContainerStatus{
		{State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}},
	}}
	f.put(young, dying, ended)
	c := startSynced(t, f, patient)
	eventually(t, c, "all are learned", func() bool { return c.State().Incomplete == 0 })
	users := usersOf(t, c, "vol-data")
	check.That(t, slices.Equal(users, []string{"a-young"}), "using: %v", users)
	f.put(old, still)
	eventually(t, c, "all are learned", func() bool { s := c.State(); return s.Incomplete == 0 && s.Pods == 5 })
	users = usersOf(t, c, "vol-data")
	check.That(t, slices.Equal(users, []string{"old", "still", "a-young"}), "using: %v", users)
	for _, p := range []*corev1.Pod{young, old, still} {
		f.remove(p)
	}
	eventually(t, c, "only two are left", func() bool { return c.State().Pods == 2 })
	users = usersOf(t, c, "vol-data")
	check.That(t, slices.Equal(users, []string{"dying"}), "using: %v", users)
	// What has ended is still known: it may be asked for by name.
	check.Value(c.ByUID(t.Context(), "uid-ended"))(t)
}

// TestOfSeveralPodsOfAName the newest that is to live is explained: its predecessor may still be known, and dying.
func TestOfSeveralPodsOfAName(t *testing.T) {
	f := newFakeAPI(t)
	c := startSynced(t, f, patient)
	for n, change := range []func(*corev1.Pod){
		func(p *corev1.Pod) { p.DeletionTimestamp = new(metav1.NewTime(born)) },
		func(*corev1.Pod) {},
		func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded },
	} {
		p := aPod("web-0")
		p.UID, p.CreationTimestamp.Time = types.UID(fmt.Sprint("uid-", n)), born.Add(time.Duration(n)*time.Hour)
		change(p)
		f.put(p)
		eventually(t, c, "it is known", func() bool { return c.State().Pods == n+1 })
		got := check.Value(c.ByName(t.Context(), p.Namespace+"/web-0"))(t)
		check.That(t, got.UID == fmt.Sprint("uid-", min(n, 1)), "of %d it is %s", n+1, got.UID)
	}
}

func TestGroupIsForWhatKubeletWouldChange(t *testing.T) {
	yes := true
	typeless, shared, alone, none := "", corev1.ReadWriteMany, corev1.ReadWriteOncePod, storagev1.NoneFSGroupPolicy
	cases := map[string]struct {
		driver *storagev1.CSIDriver
		fsType *string
		mode   corev1.PersistentVolumeAccessMode
		change func(*corev1.Pod)
		want   bool
	}{
		"no object of the driver":    {nil, nil, "", nil, true},
		"default, no type":           {nil, &typeless, "", nil, false},
		"default, shared":            {nil, nil, shared, nil, false},
		"default, one pod":           {nil, nil, alone, nil, true},
		"policy unset":               {csiDriver(""), nil, "", nil, true},
		"by type, no type":           {csiDriver(storagev1.ReadWriteOnceWithFSTypeFSGroupPolicy), &typeless, "", nil, false},
		"File, no type and shared":   {csiDriver(storagev1.FileFSGroupPolicy), &typeless, shared, nil, true},
		"None":                       {csiDriver(none), nil, "", nil, false},
		"File, read-only":            {csiDriver(storagev1.FileFSGroupPolicy), nil, "", readOnlyClaim, false},
		"inline without type":        {nil, nil, "", inline(&corev1.CSIVolumeSource{Driver: driver}), false},
		"inline with type":           {nil, nil, "", inline(&corev1.CSIVolumeSource{Driver: driver, FSType: new("xfs")}), true},
		"inline, type, read-only":    {nil, nil, "", inline(&corev1.CSIVolumeSource{Driver: driver, FSType: new("xfs"), ReadOnly: &yes}), false},
		"a container's own readOnly": {nil, nil, "", func(p *corev1.Pod) { p.Spec.Containers[0].VolumeMounts[0].ReadOnly = true }, true},
	}
	for name, one := range cases {
		t.Run(name, func(t *testing.T) {
			f := newFakeAPI(t)
			pvc, pv := bound("data")
			if one.fsType != nil {
				pv.Spec.CSI.FSType = *one.fsType
			}
			if one.mode != "" {
				pv.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{one.mode}
			}
			p := aPod("a", "data")
			p.Spec.SecurityContext = &corev1.PodSecurityContext{FSGroup: new(int64(7))}
			if one.change != nil {
				one.change(p)
			}
			f.put(pvc, pv, p)
			if one.driver != nil {
				f.put(one.driver)
			}
			got := check.Value(start(t, f, patient).ByUID(t.Context(), "uid-a"))(t)
			check.That(t, len(got.Volumes) == 1 && got.Volumes[0].NoGroup != one.want && got.FSGroup == "7", "got %+v", got)
		})
	}
}

func readOnlyClaim(p *corev1.Pod) { p.Spec.Volumes[0].PersistentVolumeClaim.ReadOnly = true }

func inline(from *corev1.CSIVolumeSource) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Spec.Volumes[0].VolumeSource = corev1.VolumeSource{CSI: from} }
}

// TestGroupWaitsForDrivers: without their policies nobody knows whose the files shall be.
func TestGroupWaitsForDrivers(t *testing.T) {
	f := newFakeAPI(t)
	f.setRefused("list csidrivers", 403)
	p := aPod("grouped")
	p.Spec.SecurityContext = &corev1.PodSecurityContext{FSGroup: new(int64(7))}
	f.put(p, aPod("plain"))
	c := start(t, f, hasty)
	eventually(t, c, "the failure is seen", func() bool { return c.health.problem(allDrivers) != nil && c.pods.table.ready() })
	check.Kind(t, check.Err(c.ByUID(t.Context(), "uid-grouped")), volume.Timeout, "fsGroup", allDrivers, "does not allow", "Forbidden")
	check.Value(c.ByUID(t.Context(), "uid-plain"))(t)
	s := c.State()
	check.That(t, !s.Synced["csidrivers"] && s.Synced["pods"] && len(s.Problems) == 1 && strings.Contains(s.Problems[0], thisNode), "state %+v", s)
}

func TestDriversOfTheCSINode(t *testing.T) {
	f := newFakeAPI(t)
	c := startSynced(t, f, hasty)
	fails := func(kind volume.Kind, words ...string) {
		t.Helper()
		got, err := c.NodeDrivers(t.Context())
		check.Kind(t, err, kind, words...)
		check.That(t, got == nil && c.State().CSINode != nil && strings.Contains(c.State().CSINode.Error(), err.Error()),
			"got %v, and the state says %v", got, c.State().CSINode)
	}
	fails(volume.Busy, "the CSINode "+thisNode, "does not exist")
	f.put(&storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: thisNode}, Spec: storagev1.CSINodeSpec{
		Drivers: []storagev1.CSINodeDriver{{Name: driver, NodeID: "n"}},
	}})
	got, err := c.NodeDrivers(t.Context())
	check.That(t, err == nil && len(got) == 1 && got[driver] && c.State().CSINode == nil,
		"got %v, %v; the state says %v", got, err, c.State().CSINode)
	f.setRefused("get csinodes", 403)
	fails(volume.Busy, "may not be read by our identity")
	f.setAway(true)
	fails(volume.Timeout, "cannot be reached", f.server.URL)
	n := f.count("list csinodes") + f.count("watch csinodes")
	check.That(t, n == 0, "a right was asked for that a node does not have: %d times", n)
}
