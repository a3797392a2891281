//go:build system

package kube_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
)

// TestSidecars has the real CSI sidecars make, grow, clone, snapshot and remove volumes
// that sandboxes have, for pods that the scheduler places.
func TestSidecars(t *testing.T) {
	k := cluster.On(t)
	k.StartSidecars(cluster.Block, cluster.Native)
	inEachWay(k, t, "StatefulSet", replicas)
	inEachWay(k, t, "kinds of claims", kindsOfClaims)
	inEachWay(k, t, "clone", clones)
	inEachWay(k, t, "snapshots of a writer", snapshotsOfAWriter)
	inEachWay(k, t, "group", groupSnapshots)
	inEachWay(k, t, "frozen by hand", frozenSnapshots)
}

// replicas has a StatefulSet's pods come, grow, go and come back to their volumes, which go with it.
func replicas(k *cluster.Kube, way, driver string) {
	s := k.NewStatefulSet("db-"+way, driver, 2)
	for _, p := range s.Ready() {
		v := s.Volume(p)
		wantDeferred(k, p, v, inCrust)
		wantGuarded(k, p, v)
		wantPlaced(k, v)
		p.Exec("echo " + p.Name + " > /data/name && sync")
		v.Edit(2 * v.Size)
		v.WaitGrown()
		wantSize(k, p, v)
		wantClaim(k, v)
	}
	s.Scale(0)
	k.Eventually("no pod is left", s.Gone)
	s.Scale(2)
	var volumes []*cluster.Volume
	for _, p := range s.Ready() {
		v := s.Volume(p)
		wantOut(k, p, "main", "cat /data/name", p.Name+"\n")
		wantSize(k, p, v)
		volumes = append(volumes, v)
	}
	k.Must(s.Remove())
	for _, v := range volumes {
		k.Must(v.WaitRemoved())
	}
}

// wantPlaced wants a volume that was made for the node that the scheduler has chosen, and may be nowhere else.
func wantPlaced(k *cluster.Kube, v *cluster.Volume) {
	k.T.Helper()
	core := k.Client.CoreV1()
	claim, err := core.PersistentVolumeClaims(cluster.Namespace).Get(k.T.Context(), v.Name, metav1.GetOptions{})
	k.Must(err)
	node := claim.Annotations["volume.kubernetes.io/selected-node"]
	check.That(k.T, node == cluster.NodeName, "claim %s was made for node %q", v.Name, node)
	pv, err := core.PersistentVolumes().Get(k.T.Context(), v.PV, metav1.GetOptions{})
	k.Must(err)
	check.That(k.T, pv.Spec.NodeAffinity != nil && pv.Spec.NodeAffinity.Required != nil, "volume %s may be anywhere", v.PV)
}

// kindsOfClaims has a pod with a raw block volume, one for itself only, and one that goes with it.
func kindsOfClaims(k *cluster.Kube, way, driver string) {
	disk := k.NewClaim(cluster.VolumeOptions{Name: "made-raw-" + way, Driver: driver, Raw: true})
	own := k.NewClaim(cluster.VolumeOptions{Name: "made-own-" + way, Driver: driver, Mode: corev1.ReadWriteOncePod})
	wantUnbound(k, own)
	p := k.NewPod("kinds-"+way, cluster.Crust).With(disk, "/dev/disk").With(own, "/own")
	fromTemplate(p, "scratch", driver)
	p.Start()
	scratch := k.ClaimOf(p.Name+"-scratch", driver)
	for _, v := range []*cluster.Volume{own.Bound(), scratch} {
		wantDeferred(k, p, v, inCrust)
	}
	wantOut(k, p, "main", "blockdev --getsize64 /dev/disk", fmt.Sprintln(disk.Size))
	p.Exec("echo own > /own/file && echo scratch > /scratch/file && sync")

	second := k.NewPod("kinds-second-"+way, cluster.Crust).With(own, "/own").Create()
	second.WaitEvent("FailedScheduling", "ReadWriteOncePod")
	wantOut(k, p, "main", "cat /own/file", "own\n")
	p.Delete()
	k.Must(scratch.WaitRemoved())
	second.WaitReady()
	wantOut(k, second, "main", "cat /own/file", "own\n")
	second.Delete()
}

// fromTemplate gives a pod a generic ephemeral volume, which the sidecars make.
func fromTemplate(p *cluster.Pod, name, driver string) {
	p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{
		Ephemeral: &corev1.EphemeralVolumeSource{VolumeClaimTemplate: &corev1.PersistentVolumeClaimTemplate{
			Spec: cluster.VolumeOptions{Driver: driver, FS: "xfs"}.DelayedSpec(),
		}},
	}})
	main := &p.Spec.Containers[0]
	main.VolumeMounts = append(main.VolumeMounts, corev1.VolumeMount{Name: name, MountPath: "/" + name})
}

// clones has a claim made from another one, which a pod is writing to, and lets it be larger.
func clones(k *cluster.Kube, way, driver string) {
	source := k.NewClaim(cluster.VolumeOptions{Name: "cloned-" + way, Driver: driver})
	writer := k.NewPod("cloned-"+way, cluster.Crust).With(source, "/data").Start()
	writer.Exec("echo before > /data/file") // not synced: the source is frozen for the clone
	clone := k.NewClaim(cluster.VolumeOptions{
		Name: "clone-" + way, Driver: driver, Size: 2 * source.Size,
		From: &corev1.TypedLocalObjectReference{Kind: "PersistentVolumeClaim", Name: source.Name},
	})
	reader := k.NewPod("clone-"+way, cluster.Crust).With(clone, "/data").Start()
	wantDeferred(k, reader, clone.Bound(), inCrust)
	wantOut(k, reader, "main", "cat /data/file && echo clone > /data/file && sync", "before\n")
	wantSize(k, reader, clone)
	wantOut(k, writer, "main", "cat /data/file", "before\n")
	reader.Delete()
	writer.Delete()
}

func snapshot(name string) *corev1.TypedLocalObjectReference {
	group := "snapshot.storage.k8s.io"
	return &corev1.TypedLocalObjectReference{APIGroup: &group, Kind: "VolumeSnapshot", Name: name}
}

// snapshotsOfAWriter takes snapshots under a pod that writes and syncs line after line. They
// outlive its claim, and are restored to larger ones. Each has all lines that were promised
// before it, without a gap; another pod goes on from there.
func snapshotsOfAWriter(k *cluster.Kube, way, driver string) {
	name := "written-" + way
	source := &ledger{Volume: k.NewClaim(cluster.VolumeOptions{Name: name, Driver: driver}), k: k}
	w := newWriter(k, name, cluster.Crust, source)
	w.settle(k)
	var copies []*ledger
	for _, one := range []string{"-a", "-b"} {
		w.goesOn(k)
		copies = append(copies, &ledger{k: k, promised: source.promised})
		k.Snapshot(name+one, source.Volume)
	}
	w.unchanged(k, false)
	w.Delete()
	k.Must(source.RemoveClaim())
	for i, one := range []string{"-a", "-b"} {
		copies[i].Volume = k.NewClaim(cluster.VolumeOptions{Name: name + one, Driver: driver, Size: 2 * source.Size, From: snapshot(name + one)})
		c := newWriter(k, name+one, cluster.Crust, copies[i])
		c.settle(k)
		wantDeferred(k, c.Pod, c.on.Bound(), inCrust)
		wantSize(k, c.Pod, c.on.Volume)
		c.keeps(k)
		c.Delete()
	}
}

// frozenSnapshots freezes a volume around a snapshot by crustctl, as the recipe has it for drivers that do not. The
// driver here would freeze it itself, but cannot while another one does.
func frozenSnapshots(k *cluster.Kube, way, driver string) {
	name := "frozen-" + way
	source := k.NewClaim(cluster.VolumeOptions{Name: name, Driver: driver})
	writer := k.NewPod(name, cluster.Crust).With(source, "/data").Start()
	writer.Exec("echo before > /data/file") // not synced
	target, none := writer.Target(source.Bound()), new(any)
	k.Must(ask(k, none, "freeze", target, "--for", "5m"))
	is, err := crustctl(k, target)
	k.Must(err)
	check.That(k.T, strings.HasPrefix(is.Snapshots, "clean (frozen by"), "crustctl shows %+v", is)
	k.Snapshot(name, source)
	k.Must(check.Err(k.Kubectl("wait", "--for=jsonpath={.status.creationTime}", "--timeout="+cluster.Patience.String(), "volumesnapshot/"+name)))
	k.Must(ask(k, none, "thaw", target)) // it was frozen all the time
	writer.Exec("echo after > /data/file && sync")
	copied := k.NewClaim(cluster.VolumeOptions{Name: name + "-restored", Driver: driver, From: snapshot(name)})
	reader := k.NewPod(name+"-restored", cluster.Crust).With(copied, "/data").Start()
	wantOut(k, reader, "main", "cat /data/file", "before\n")
	reader.Delete()
	writer.Delete()
}

// groupSnapshots has both volumes of a pod snapshot together, and one made from each.
func groupSnapshots(k *cluster.Kube, way, driver string) {
	name := "group-" + way
	writer := k.NewPod(name, cluster.Crust)
	var sources []*cluster.Volume
	for _, at := range []string{"/one", "/two"} {
		v := k.NewClaim(cluster.VolumeOptions{Name: name + "-" + at[1:], Driver: driver})
		k.Must(check.Err(k.Kubectl("label", "persistentvolumeclaim/"+v.Name, "group="+name)))
		writer.With(v, at)
		sources = append(sources, v)
	}
	writer.Start().Exec("echo " + sources[0].Name + " > /one/file && echo " + sources[1].Name + " > /two/file")
	k.SnapshotGroup(name, driver, "group="+name)
	writer.Exec("echo after > /one/file && echo after > /two/file && sync")
	reader := k.NewPod(name+"-restored", cluster.Crust)
	for i, at := range []string{"/one", "/two"} {
		member, err := k.Kubectl("get", "volumesnapshots", "--output=jsonpath={.items[?(@.spec.source.persistentVolumeClaimName==\""+sources[i].Name+"\")].metadata.name}")
		k.Must(err)
		reader.With(k.NewClaim(cluster.VolumeOptions{Name: sources[i].Name + "-restored", Driver: driver, From: snapshot(member)}), at)
	}
	reader.Start()
	wantOut(k, reader, "main", "cat /one/file /two/file", sources[0].Name+"\n"+sources[1].Name+"\n")
	reader.Delete()
	writer.Delete()
}

// wantUnbound wants a claim to wait for the first pod that wants it.
func wantUnbound(k *cluster.Kube, v *cluster.Volume) {
	k.T.Helper()
	k.Eventually("claim "+v.Name+" waits for a pod", func(ctx context.Context) error {
		events, err := k.Client.CoreV1().Events(cluster.Namespace).List(ctx, metav1.ListOptions{
			FieldSelector: "involvedObject.name=" + v.Name + ",reason=WaitForFirstConsumer",
		})
		if err == nil && len(events.Items) == 0 {
			err = errors.New("there is no such event")
		}
		return err
	})
	claim, err := k.Client.CoreV1().PersistentVolumeClaims(cluster.Namespace).Get(k.T.Context(), v.Name, metav1.GetOptions{})
	k.Must(err)
	check.That(k.T, claim.Spec.VolumeName == "", "claim %s has volume %s before any pod", v.Name, claim.Spec.VolumeName)
}

func wantSize(k *cluster.Kube, p *cluster.Pod, v *cluster.Volume) {
	k.T.Helper()
	has := p.DF("/data")
	check.That(k.T, has.Total >= v.Size*8/10 && has.Total <= v.Size, "pod %s has %+v of %d bytes", p.Name, has, v.Size)
}

// wantClaim wants the claim to say the volume's size, and that nothing is pending.
func wantClaim(k *cluster.Kube, v *cluster.Volume) {
	k.T.Helper()
	claim, err := k.Client.CoreV1().PersistentVolumeClaims(cluster.Namespace).Get(k.T.Context(), v.Name, metav1.GetOptions{})
	k.Must(err)
	has := claim.Status.Capacity[corev1.ResourceStorage]
	check.That(k.T, has.Value() == v.Size && !cluster.Resizes(claim) && len(claim.Status.AllocatedResourceStatuses) == 0,
		"the claim says %+v", claim.Status)
}
