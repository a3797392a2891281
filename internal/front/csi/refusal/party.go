package refusal

import (
	"time"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Party is who refused a volume.
type Party string

// The parties.
const (
	// PartyPolicy is this node's policy, or the attribute of a volume.
	PartyPolicy Party = "policy"
	// PartyPod is what the pod asks for.
	PartyPod Party = "pod"
	// PartyPods is the lookup of pods: it does not know the pod, or not yet.
	PartyPods Party = "pods"
	// PartyVolume is the volume itself: its access mode, or another pod that has it.
	PartyVolume Party = "volume"
	// PartyHandler is the runtime handler.
	PartyHandler Party = "handler"
	// PartyDriver is the CSI driver.
	PartyDriver Party = "driver"
	// PartyDevice is the device: what is on it, or who has it.
	PartyDevice Party = "device"
	// PartyRequest is a request that is wrong by itself.
	PartyRequest Party = "request"
	// PartyNode is this node: crust-proxy itself, its disk, its kernel.
	PartyNode Party = "node"
)

// Refusal is a volume that a pod waits for and that could not be deferred. It is not on record.
type Refusal struct {
	Key volume.Key
	// Target is the publish target, or the staging path where the volume was refused as it was staged.
	Target           string
	Driver, VolumeID string
	FSType           string
	AccessMode       string
	// PodUID, PodNamespace and PodName are empty if they are not known.
	PodUID, PodNamespace, PodName string
	// PVC is the claim in PodNamespace, if it is known.
	PVC string
	// Rule is the rule that decided, and Handler the handler that would have got the
	// volume; each is empty if it was not reached.
	Rule, Handler string
	Party         Party
	// Error is one sentence.
	Error       string
	First, Last time.Time
	Count       int64
}
