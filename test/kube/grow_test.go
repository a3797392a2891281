//go:build system

package kube_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// TestClaimsGrow grows claims in all the ways that people do.
func TestClaimsGrow(t *testing.T) {
	k := cluster.On(t)
	inEachWay(k, t, "in use", growInUse)
	inEachWay(k, t, "unused", growUnused)
}

// growInUse grows a volume under a pod; the next pod finds data and size.
func growInUse(k *cluster.Kube, way, driver string) {
	v := k.NewVolume(cluster.VolumeOptions{Name: "grown-" + way, Driver: driver, FS: "btrfs"})
	first := k.NewPod("growing-"+way, cluster.Crust).With(v, "/data").Start()
	first.Exec("echo kept > /data/file && sync")
	small := first.DF("/data")
	v.Grow(2 * v.Size)
	v.WaitGrown()
	large := first.WaitStats(v, "/data")
	if large.Total < small.Total+v.Size/2*9/10 {
		k.T.Errorf("it went from %+v to %+v", small, large)
	}
	wantClaim(k, v)
	first.Delete()
	second := k.NewPod("grown-"+way, cluster.Crust).With(v, "/data").Start()
	wantOut(k, second, "main", "cat /data/file", "kept\n")
	if has := second.DF("/data"); has.Total != large.Total {
		k.T.Errorf("the second pod has %+v", has)
	}
	second.Delete()
}

// growUnused grows a volume that no pod has: kubelet has it grown for the next pod,
// and the sandbox does so as it mounts it. Then it is grown in use, where the kernel
// lets root.
func growUnused(k *cluster.Kube, way, driver string) {
	v := k.NewVolume(cluster.VolumeOptions{Name: "unused-" + way, Driver: driver})
	first := k.NewPod("unused-"+way, cluster.Crust).With(v, "/data").Start()
	first.Exec("echo kept > /data/file && sync")
	first.Delete()
	v.Grow(2 * v.Size)
	second := k.NewPod("used-"+way, cluster.Crust).With(v, "/data").Start()
	v.WaitGrown()
	wantSize(k, second, v)
	v.Grow(2 * v.Size)
	if rig.MayGrow(k.T, "ext4") {
		v.WaitGrown()
	} else {
		// Kubelet takes the code of that for "not while it is in use", and makes no event.
		k.Eventually("crustctl shows why it does not grow", func(context.Context) error {
			is, err := crustctl(k, second.Target(v))
			if err == nil && !strings.Contains(is.LastError, "CAP_SYS_RESOURCE") {
				err = fmt.Errorf("it shows %+v", is)
			}
			return err
		})
		wantOut(k, second, "main", "cat /data/file && touch /data/works", "kept\n")
		second.Delete()
		second = k.NewPod("used-again-"+way, cluster.Crust).With(v, "/data").Start()
		v.WaitGrown()
	}
	wantSize(k, second, v)
	wantClaim(k, v)
	wantOut(k, second, "main", "cat /data/file", "kept\n")
	second.Delete()
}

func wantSize(k *cluster.Kube, p *cluster.Pod, v *cluster.Volume) {
	k.T.Helper()
	if has := p.DF("/data"); has.Total < v.Size*8/10 || has.Total > v.Size {
		k.T.Errorf("pod %s has %+v of %d bytes", p.Name, has, v.Size)
	}
}

// wantClaim wants the claim to say the volume's size, and that nothing is pending.
func wantClaim(k *cluster.Kube, v *cluster.Volume) {
	k.T.Helper()
	claim, err := k.Client.CoreV1().PersistentVolumeClaims(cluster.Namespace).Get(k.T.Context(), v.Name, metav1.GetOptions{})
	k.Must(err)
	has := claim.Status.Capacity[corev1.ResourceStorage]
	if has.Value() != v.Size || len(claim.Status.Conditions) != 0 || len(claim.Status.AllocatedResourceStatuses) != 0 {
		k.T.Errorf("the claim says %+v", claim.Status)
	}
}
