package volume

import "time"

// Party is who said no to a volume.
type Party string

// The parties.
const (
	// PartyPolicy is this node's policy, or the attribute of a volume.
	PartyPolicy Party = "policy"
	// PartyPod is what the pod asks for.
	PartyPod Party = "pod"
	// PartyPods is the look-up of pods, which does not know, or not yet.
	PartyPods Party = "pods"
	// PartyVolume is the volume itself: its access mode, or who has it already.
	PartyVolume Party = "volume"
	// PartyHandler is the runtime handler.
	PartyHandler Party = "handler"
	// PartyDriver is the CSI driver.
	PartyDriver Party = "driver"
	// PartyDevice is what is on the device, or who has it.
	PartyDevice Party = "device"
	// PartyRequest is a request that cannot be right.
	PartyRequest Party = "request"
	// PartyNode is this node: crust-proxy itself, its disk, its kernel.
	PartyNode Party = "node"
)

// Refusal is a volume that a pod waits for and that could not be deferred. It is
// not on record.
type Refusal struct {
	Key Key
	// Target is the publish target, or the staging path where the volume was
	// refused as it was staged.
	Target           string
	Driver, VolumeID string
	FSType           string
	AccessMode       string
	// PodUID, PodNamespace and PodName are empty where they are not known.
	PodUID, PodNamespace, PodName string
	// Rule is the word that decided, and Handler would have had the volume; each
	// is empty where it did not come to that.
	Rule, Handler string
	Party         Party
	// Error is one sentence.
	Error       string
	First, Last time.Time
	Count       int64
}
