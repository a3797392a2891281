// Package oci is for authors of runtimes and shims. It finds the deferred volumes among the
// mounts of an OCI container, and records for the broker which sandbox has them.
//
// A volume is identified by the guard mount at the source of a bind mount, not by the path: however a sub-directory was
// bound, the kernel says of which volume it is, and where in it. What is found is held by descriptors, so that nobody
// can replace it between the check and the use.
//
// Names and types are only added; to remove one would be a new major version.
package oci

import (
	"encoding/json"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// Sandbox is the pod that a container is of, as the container runtime wrote it into the annotations of the container.
type Sandbox struct {
	// ID is the sandbox id.
	ID string
	// PodUID is the pod's UID in Kubernetes, or "" if it is not known.
	PodUID string
	// Self is set if the container is the sandbox itself.
	Self bool
}

// The annotations of containerd and of CRI-O.
const (
	containerdType = "io.kubernetes.cri.container-type"
	containerdID   = "io.kubernetes.cri.sandbox-id"
	containerdPod  = "io.kubernetes.cri.sandbox-uid"
	crioType       = "io.kubernetes.cri-o.ContainerType"
	crioID         = "io.kubernetes.cri-o.SandboxID"
	crioLabels     = "io.kubernetes.cri-o.Labels"
	podLabel       = "io.kubernetes.pod.uid"

	typeSandbox = "sandbox"
)

// SandboxOf reads the sandbox of a container. known is false for a container that was not made by the CRI, and for one
// with the annotations of two runtimes: CRI-O copies the pod's into the spec, so the pod's author wrote containerd's.
// Find refuses deferred volumes to such a container.
func SandboxOf(spec *specs.Spec) (s Sandbox, known bool) {
	notes := spec.Annotations
	if ofTwoRuntimes(notes) {
		return Sandbox{}, false
	}
	if id := notes[containerdID]; id != "" {
		return Sandbox{ID: id, PodUID: notes[containerdPod], Self: notes[containerdType] == typeSandbox}, true
	}
	if id := notes[crioID]; id != "" {
		return Sandbox{ID: id, PodUID: crioPod(notes), Self: notes[crioType] == typeSandbox}, true
	}
	return Sandbox{}, false
}

func ofTwoRuntimes(notes map[string]string) bool {
	has := func(key string) bool { return notes[key] != "" }
	return (has(containerdType) || has(containerdID) || has(containerdPod)) && (has(crioType) || has(crioID))
}

func crioPod(notes map[string]string) string {
	if uid := notes[podLabel]; uid != "" {
		return uid
	}
	var labels map[string]string
	if json.Unmarshal([]byte(notes[crioLabels]), &labels) != nil {
		return ""
	}
	return labels[podLabel]
}
