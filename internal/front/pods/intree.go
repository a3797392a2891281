package pods

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	translation "k8s.io/csi-translation-lib"
)

// inTree translates Kubernetes' former in-tree volumes to the CSI driver and volume id by which kubelet asks for them.
var inTree = translation.New()

// inTreeInline returns the CSI volume of an inline in-tree volume, or the zero source.
func inTreeInline(api *corev1.Volume, namespace string) source {
	if !inTree.IsInlineMigratable(api) {
		return source{}
	}
	pv, err := translated(func() (*corev1.PersistentVolume, error) {
		return inTree.TranslateInTreeInlineVolumeToCSI(logr.Discard(), api, namespace)
	})
	if err != nil {
		return source{} // kubelet cannot mount it either
	}
	return sourceOf(pv)
}

// sourceOfPV returns the CSI volume of a persistent volume, or the zero source.
func sourceOfPV(pv *corev1.PersistentVolume) (source, error) {
	if pv.Spec.CSI == nil && inTree.IsPVMigratable(pv) {
		migrated, err := translated(func() (*corev1.PersistentVolume, error) { return inTree.TranslateInTreePVToCSI(logr.Discard(), pv) })
		if err != nil {
			return source{}, err
		}
		pv = migrated
	}
	return sourceOf(pv), nil
}

// translated is what the library makes of a volume whose fields anyone may have written. It panics over some,
// and one pod must not end the daemon at each start.
func translated(translate func() (*corev1.PersistentVolume, error)) (pv *corev1.PersistentVolume, err error) {
	defer func() {
		if reason := recover(); reason != nil {
			err = fmt.Errorf("it cannot be translated: %v", reason)
		}
	}()
	return translate()
}

func sourceOf(pv *corev1.PersistentVolume) source {
	if pv.Spec.CSI == nil {
		return source{}
	}
	return source{
		mode: string(append(slices.Clone(pv.Spec.AccessModes), "")[0]), context: deciding(pv.Spec.CSI.VolumeAttributes),
		driver: pv.Spec.CSI.Driver, id: pv.Spec.CSI.VolumeHandle, fsType: pv.Spec.CSI.FSType,
		class: cmp.Or(pv.Annotations[corev1.BetaStorageClassAnnotation], pv.Spec.StorageClassName),
		once: slices.ContainsFunc(pv.Spec.AccessModes, func(mode corev1.PersistentVolumeAccessMode) bool {
			return mode == corev1.ReadWriteOnce || mode == corev1.ReadWriteOncePod
		}),
	}
}
