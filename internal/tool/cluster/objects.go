package cluster

import (
	"slices"
	"time"
)

// What is read of the cluster's objects, and no more: a bundle for support has only fields that are known to hold no secret.

type meta struct {
	Name, Namespace, UID string
	DeletionTimestamp    *time.Time
	OwnerReferences      []map[string]any
}

type objects[T any] struct {
	Metadata struct{ Continue string }
	Items    []T
}

type condition struct{ Type, Status, Reason, Message string }

type container struct {
	Name, Image string
	Ports       []struct {
		Name          string
		ContainerPort int
	}
	SecurityContext struct{ Privileged bool }
}

type pod struct {
	Metadata meta
	Spec     struct {
		NodeName   string
		Containers []container
		Volumes    []struct{ ConfigMap struct{ Name string } }
	}
	Status struct {
		Phase, Reason, Message, PodIP string
		Conditions                    []condition
		ContainerStatuses             []struct {
			Name, ImageID string
			RestartCount  int
			State         map[string]struct{ Reason, Message string }
		}
	}
}

// ours reports whether the pod is of a DaemonSet, and privileged, as those of crust-proxy are: anybody may have a
// DaemonSet with our label, but who may run a privileged pod is root on the nodes anyway.
func (p pod) ours() bool {
	return slices.ContainsFunc(p.Metadata.OwnerReferences, func(o map[string]any) bool { return o["kind"] == "DaemonSet" && o["controller"] == true }) &&
		slices.ContainsFunc(p.Spec.Containers, func(c container) bool { return c.SecurityContext.Privileged })
}

// port is the one that is called http, or the usual one.
func (p pod) port(usual int) int {
	for _, c := range p.Spec.Containers {
		for _, port := range c.Ports {
			if port.Name == "http" {
				return port.ContainerPort
			}
		}
	}
	return usual
}

// waits says why a pod does not run; it is empty for one that does.
func (p pod) waits() string {
	for _, status := range p.Status.ContainerStatuses {
		if waiting, is := status.State["waiting"]; is {
			return waiting.Reason + " " + waiting.Message
		}
	}
	for _, c := range p.Status.Conditions {
		if c.Status == "False" && c.Message != "" && p.Status.Phase == "Pending" {
			return c.Reason + " " + c.Message
		}
	}
	if p.Status.PodIP == "" || p.Status.Phase == "Failed" {
		return p.Status.Phase + " " + p.Status.Reason + " " + p.Status.Message
	}
	return ""
}

type node struct{ Metadata meta }

type claim struct {
	Spec   struct{ VolumeName string }
	Status struct{ Capacity map[string]string }
}

type persistentVolume struct {
	Spec struct {
		ReclaimPolicy string `json:"persistentVolumeReclaimPolicy"`
	}
	Status struct{ Phase, Message string }
}

type daemonSet struct {
	Metadata meta
	Status   struct{ DesiredNumberScheduled, NumberReady, UpdatedNumberScheduled int }
}

type event struct {
	Metadata                             meta
	Type, Reason, Message, LastTimestamp string
	InvolvedObject                       struct{ Kind, Name string }
}
