package refusal

import (
	"errors"
	"strings"

	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// What a user of Kubernetes can do about errors of the core, which knows no pods.
const (
	DeletePod = "delete its pod"
	EndVM     = "if that is the VM of a pod that has gone, end the VM (with Kata: `crustctl end`; never only its shim), and repeat"
	WaitForIt = "wait until the other pod is gone (a Deployment needs strategy: Recreate for that)"
)

// WithAdvice adds to an error of the broker what to do about it. It is harmless to call it twice.
func WithAdvice(err error) error {
	held, isHeld := errors.AsType[*claim.HeldError](err)
	_, owned := errors.AsType[*claim.OwnedError](err)
	advice := ""
	switch {
	case errors.Is(err, claim.ErrLost):
		advice = DeletePod
	case isHeld && (!held.By.Kernel || !strings.HasSuffix(held.By.Names, "unmount it")):
		advice = EndVM
	case owned:
		advice = WaitForIt
	}
	if advice == "" || strings.Contains(err.Error(), advice) {
		return err
	}
	return volume.Errorf(volume.KindOf(err), "%w; %s", err, advice)
}

// GrowsWhen explains what grows the filesystem of a volume if the sandboxes of its handler do not.
func GrowsWhen(v *volume.Volume) string {
	if v.FSType == "ext4" && v.Origin != nil && v.Origin.Way == volume.WayBlock {
		const next = "the pod is deleted and started again, before the new sandbox gets it"
		if v.KeepSize {
			return "the policy's rule says grow: false; without that it grows when " + next
		}
		return "it grows when " + next
	}
	return "no sandbox of " + v.Handler + " grows it: with thenOnHost: allow in the policy's rule, it grows once a pod without sandbox mounts it"
}
