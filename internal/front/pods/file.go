package pods

import (
	"bufio"
	"bytes"
	"cmp"
	"errors"
	"io"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/yaml"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/decision"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Read returns the one pod in a file of manifests, as the lookup will once the pod is on the node. Beside it are its
// RuntimeClass, its claims, and of each claim the persistent volume, or the StorageClass that will make it. A
// CSIDriver may be missing, as in a cluster.
func Read(file []byte) (decision.Pod, error) {
	cluster, k, failed, claims := New(Config{Log: zap.NewNop()}), known{}, make(map[string]error), make(map[string]*corev1.PersistentVolumeClaim)
	_ = errors.Join(cluster.classes.Replace(nil, ""), cluster.drivers.Replace(nil, "")) // tables never fail
	objects, err := decode(file)
	for _, object := range objects {
		switch object := object.(type) {
		case *corev1.Pod:
			if k.pod != nil {
				return decision.Pod{}, errors.New("there are several Pods in it, and one is explained")
			}
			object.Namespace = cmp.Or(object.Namespace, metav1.NamespaceDefault)
			k = known{podOf(object), make(map[string]source)}
			for _, v := range object.Spec.Volumes {
				if v.Ephemeral != nil && v.Ephemeral.VolumeClaimTemplate != nil {
					claims[object.Name+"-"+v.Name] = &corev1.PersistentVolumeClaim{Spec: v.Ephemeral.VolumeClaimTemplate.Spec}
				}
			}
		case *corev1.PersistentVolumeClaim:
			claims[object.Name] = object
		case *nodev1.RuntimeClass:
			_ = cluster.classes.Add(object)
		case *storagev1.CSIDriver:
			_ = cluster.drivers.Add(object)
		}
	}
	if err != nil || k.pod == nil {
		return decision.Pod{}, cmp.Or(err, errors.New("there is no Pod in it"))
	}
	for _, v := range k.unlearned() {
		found, err := sourceIn(objects, v.Claim, claims[v.Claim])
		if failed[v.Name] = err; err == nil {
			k.learned[v.Name] = found
		}
	}
	return cluster.answer(k, failed)
}

func decode(file []byte) (objects []runtime.Object, err error) {
	scheme, err := newScheme()
	decoder := serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDeserializer()
	for documents := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(file))); err == nil; {
		var raw []byte
		if raw, err = documents.Read(); err != nil || len(bytes.TrimSpace(raw)) == 0 {
			continue
		}
		object, _, failed := decoder.Decode(raw, nil, nil)
		if runtime.IsMissingKind(failed) || runtime.IsMissingVersion(failed) { // its text has all of the document
			return nil, errors.New("a document in it has no kind or apiVersion")
		}
		if !runtime.IsNotRegisteredError(failed) { // as a Deployment is
			objects, err = append(objects, object), failed
		}
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return objects, err
}

// sourceIn returns the volume of a claim: its persistent volume, or what its StorageClass will make.
func sourceIn(objects []runtime.Object, name string, claim *corev1.PersistentVolumeClaim) (source, error) {
	if claim == nil {
		return source{}, volume.Errorf(volume.Busy, "the claim %s is not in the file", name)
	}
	for _, object := range objects {
		switch object := object.(type) {
		case *corev1.PersistentVolume:
			if object.Name == claim.Spec.VolumeName {
				return sourceOfPV(object)
			}
		case *storagev1.StorageClass:
			if class := claim.Spec.StorageClassName; claim.Spec.VolumeName == "" && class != nil && object.Name == *class {
				pv := &corev1.PersistentVolume{Spec: corev1.PersistentVolumeSpec{AccessModes: claim.Spec.AccessModes, StorageClassName: *class}}
				pv.Spec.CSI = &corev1.CSIPersistentVolumeSource{Driver: object.Provisioner, VolumeHandle: "of " + name,
					FSType: object.Parameters["csi.storage.k8s.io/fstype"], VolumeAttributes: object.Parameters}
				return sourceOf(pv), nil
			}
		}
	}
	return source{}, volume.Errorf(volume.Busy, "the file has neither the persistent volume of the claim %s nor, if it is not bound, its StorageClass", name)
}
