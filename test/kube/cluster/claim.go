package cluster

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// NewClaim makes a claim for which the sidecars make the volume, with xfs, when the first
// pod wants it. FromVolume reads which one it is.
func (k *Kube) NewClaim(options VolumeOptions) *Volume {
	k.T.Helper()
	options.FS = "xfs"
	v := &Volume{VolumeOptions: options.complete(), k: k}
	ctx := context.Background()
	claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: v.Name, Namespace: Namespace}, Spec: v.DelayedSpec()}
	_, err := k.Client.CoreV1().PersistentVolumeClaims(Namespace).Create(ctx, claim, metav1.CreateOptions{})
	k.Must(err)
	k.T.Cleanup(func() { k.check(v.RemoveClaim()) })
	return v
}

// DelayedSpec is what a claim says that wants such a volume.
func (o VolumeOptions) DelayedSpec() corev1.PersistentVolumeClaimSpec {
	class := DelayedClass(o.Driver)
	v := Volume{VolumeOptions: o.complete()}
	return corev1.PersistentVolumeClaimSpec{
		AccessModes: []corev1.PersistentVolumeAccessMode{v.Mode}, VolumeMode: v.mode(), StorageClassName: &class,
		DataSource: v.From, Resources: corev1.VolumeResourceRequirements{Requests: storage(v.Size)},
	}
}

// ClaimOf is a claim that the cluster has made, say of a pod's template. It goes with what it was made for.
func (k *Kube) ClaimOf(name, driver string) *Volume {
	k.T.Helper()
	v := &Volume{VolumeOptions: VolumeOptions{Name: name, Driver: driver, FS: "xfs"}.complete(), k: k}
	v.Bound()
	return v
}

// Bound waits until the claim is bound, and learns to which volume.
func (v *Volume) Bound() *Volume {
	v.k.T.Helper()
	v.k.Must(v.waitBound())
	ctx := context.Background()
	core := v.k.Client.CoreV1()
	claim, err := core.PersistentVolumeClaims(Namespace).Get(ctx, v.Name, metav1.GetOptions{})
	v.k.Must(err)
	pv, err := core.PersistentVolumes().Get(ctx, claim.Spec.VolumeName, metav1.GetOptions{})
	v.k.Must(err)
	size := pv.Spec.Capacity[corev1.ResourceStorage]
	v.PV, v.Handle, v.Size = pv.Name, pv.Spec.CSI.VolumeHandle, size.Value()
	return v
}

// RemoveClaim deletes a claim of NewClaim, and waits until the sidecars have removed its volume.
func (v *Volume) RemoveClaim() error {
	claims := v.k.Client.CoreV1().PersistentVolumeClaims(Namespace)
	mended := v.k.Mend()
	claim, err := claims.Get(context.Background(), v.Name, metav1.GetOptions{})
	if err == nil {
		v.PV = claim.Spec.VolumeName
	}
	return errors.Join(mended, ignoreGone(err), removed("claim", v.Name, claims, metav1.DeleteOptions{}), v.WaitRemoved())
}

// WaitRemoved waits until the sidecars have removed the volume, which they do once the
// driver has. It waits for nothing where there never was one.
func (v *Volume) WaitRemoved() error {
	if v.PV == "" {
		return nil
	}
	return eventually("volume "+v.PV+" of claim "+v.Name+" is gone", func(ctx context.Context) error {
		pv, err := v.k.Client.CoreV1().PersistentVolumes().Get(ctx, v.PV, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		if err == nil {
			err = fmt.Errorf("it is %s: %s", pv.Status.Phase, pv.Status.Message)
		}
		return err
	})
}
