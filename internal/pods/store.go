package pods

import (
	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/client-go/tools/cache"
)

// sink takes what a watch tells.
type sink interface {
	set(object any)
	remove(object any)
	replace(objects []any)
}

// store is a sink as client-go's reflector wants it. It keeps no object: a sink
// takes the little that is needed out of it.
type store struct {
	into  sink
	heard func()
}

var (
	_ cache.TransformingStore      = (*store)(nil)
	_ cache.ReflectorBookmarkStore = (*store)(nil)
)

// Add takes an object that is new.
func (s *store) Add(object any) error {
	s.heard()
	s.into.set(object)
	return nil
}

// Update takes an object that changed.
func (s *store) Update(object any) error { return s.Add(object) }

// Delete drops an object.
func (s *store) Delete(object any) error {
	s.heard()
	s.into.remove(object)
	return nil
}

// Replace takes all objects anew.
func (s *store) Replace(objects []any, _ string) error {
	s.heard()
	s.into.replace(objects)
	return nil
}

// Resync has nothing to do.
func (s *store) Resync() error { return nil }

// Bookmark is a sign of life.
func (s *store) Bookmark(string) error {
	s.heard()
	return nil
}

// Transformer strips objects as soon as they are read: a first list of all pods is
// held in memory as a whole.
func (s *store) Transformer() cache.TransformFunc {
	return func(object any) (any, error) {
		if pod, ok := object.(*corev1.Pod); ok {
			strip(pod)
		}
		return object, nil
	}
}

func strip(pod *corev1.Pod) {
	pod.ManagedFields, pod.Labels = nil, nil
	pod.Status.Conditions, pod.Spec.Tolerations, pod.Spec.Affinity = nil, nil, nil
	for _, all := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range all {
			all[i] = corev1.Container{
				Name: all[i].Name, RestartPolicy: all[i].RestartPolicy, VolumeMounts: all[i].VolumeMounts, VolumeDevices: all[i].VolumeDevices,
			}
		}
	}
}

// podSink takes the pods of this node.
type podSink struct{ pods *pods }

func (s podSink) set(object any) {
	if p, ok := s.take(object); ok {
		s.pods.set(p)
	}
}

func (s podSink) remove(object any) {
	if pod, ok := object.(*corev1.Pod); ok {
		s.pods.remove(string(pod.UID))
	}
}

func (s podSink) replace(objects []any) {
	all := make([]*pod, 0, len(objects))
	for _, object := range objects {
		if p, ok := s.take(object); ok {
			all = append(all, p)
		}
	}
	s.pods.replace(all)
}

// take refuses a pod of another node: whoever answers, such a pod decides nothing
// here.
func (s podSink) take(object any) (*pod, bool) {
	found, ok := object.(*corev1.Pod)
	if !ok || found.Spec.NodeName != s.pods.node || found.UID == "" {
		return nil, false
	}
	return podOf(found), true
}

// attributeSink takes one attribute of each object.
type attributeSink struct{ attributes *attributes }

func (s attributeSink) set(object any) {
	if name, value := attributeOf(object); name != "" {
		s.attributes.set(name, value)
	}
}

func (s attributeSink) remove(object any) {
	if name, _ := attributeOf(object); name != "" {
		s.attributes.remove(name)
	}
}

func (s attributeSink) replace(objects []any) {
	values := make(map[string]string, len(objects))
	for _, object := range objects {
		if name, value := attributeOf(object); name != "" {
			values[name] = value
		}
	}
	s.attributes.replace(values)
}

func attributeOf(object any) (name, value string) {
	switch object := object.(type) {
	case *nodev1.RuntimeClass:
		return object.Name, object.Handler
	case *storagev1.CSIDriver:
		if object.Spec.FSGroupPolicy != nil {
			value = string(*object.Spec.FSGroupPolicy)
		}
		return object.Name, value
	}
	return "", ""
}
