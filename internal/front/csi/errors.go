package csi

import (
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/decision"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Texts of the log.
const (
	parametersIgnored = "parameters of the StorageClass say how the driver makes a filesystem, and have no effect on a deferred volume: " +
		"use mkfsOptions of a policy rule instead"
	grownDespiteError = "the driver says that it cannot grow the device, and the device has the size: the growth goes on"
)

// Texts of the condition of a volume.
const (
	healthUnknown   = "the sandbox answers; nobody can tell whether its filesystem is healthy"
	nothingAbnormal = "the sandbox answers and reports nothing abnormal"
)

// failedPrecondition is the error after which nothing is left and kubelet goes on, without asking again: it is the
// only one that does not keep a pod from starting when growth fails.
func failedPrecondition(format string, args ...any) error {
	return status.Errorf(codes.FailedPrecondition, format, args...)
}

func callUnderWay(id staging.VolumeID) error {
	return volume.Errorf(volume.Busy, "volume %s of driver %s: another call on it has not ended: repeat this one later",
		refusal.Clip(id.ID), id.Driver)
}

func notLookedUp(target string, err error) error {
	return volume.Errorf(volume.Busy, "volume %s: it cannot be looked up, so nothing is done with it: %w", target, err)
}

func inlineAtTarget(target string) error {
	return volume.Errorf(volume.Denied, "volume %s: "+
		"the pod has an inline volume that is named like this one and mounted there, or more volumes than are looked at: give that another name, or the pod fewer volumes", target)
}

func stillPublished(id staging.VolumeID, target string) error {
	return volume.Errorf(volume.Busy, "volume %s of driver %s: it is still published at %s: unpublish it first",
		refusal.Clip(id.ID), id.Driver, target)
}

func removalUnfinished(target string, err error) error {
	return volume.Errorf(volume.Busy, "volume %s: its removal was begun and cannot be ended yet: %w", target, err)
}

func beingRemoved(target string) error {
	return volume.Errorf(volume.Busy, "volume %s: its removal was begun, so it is not grown", target)
}

func interrupted(target string, err error) error {
	return refusal.WithParty(refusal.PartyDriver, volume.Errorf(volume.Busy, "volume %s: an earlier publish in another way was interrupted and cannot "+
		"be undone yet: %w", target, refusal.Plain(err)))
}

func stagedBeforeFront(w *decision.VolumeRequest, verdict *policy.Verdict) error {
	return volume.Errorf(volume.InUse, "volume %s: it is to be deferred (%s), and was staged before crust-proxy stood "+
		"in front of the driver %s: delete every pod on this node that uses the volume, so that kubelet stages it anew",
		w.Path, verdict.Rule, w.Driver)
}

func stageLost(w *decision.VolumeRequest) error {
	return volume.Errorf(volume.InUse, "volume %s: it is staged as a device, and the record of that was lost: delete every pod on "+
		"this node that uses the volume, so that kubelet stages it anew", w.Path)
}

func recordLost(id staging.VolumeID, target string) error {
	return volume.Errorf(volume.Busy, "volume %s of driver %s: its record at %s cannot be used, and a sandbox may have it there: "+
		refusal.DeletePod, refusal.Clip(id.ID), id.Driver, target)
}

func stillHeld(id staging.VolumeID, held *deferral.Status) error {
	return volume.Errorf(volume.Busy, "volume %s of driver %s: it was released by force at %s, and its device %s is still open in %s: "+refusal.EndVM,
		refusal.Clip(id.ID), id.Driver, held.Target, held.Device.Path, held.Held.Processes)
}

func badInstruction(w *decision.VolumeRequest, err error) error {
	return refusal.WithParty(refusal.PartyDriver, volume.Errorf(volume.Malformed, "volume %s: the instruction what to mount, in the answer "+
		"of driver %s, cannot be read: %w", w.Path, w.Driver, err))
}

func noInstruction(w *decision.VolumeRequest) error {
	return refusal.WithParty(refusal.PartyDriver, volume.Errorf(volume.Unsupported, "volume %s: the driver %s says that it can defer, and "+
		"has neither answered what the sandbox shall mount nor called the Runtime API: this is a fault of the driver; until "+
		"it is mended exclude the volume by a policy rule", w.Path, w.Driver))
}

func wrongHandler(w *decision.VolumeRequest, has, want string) error {
	return refusal.WithParty(refusal.PartyDriver, volume.Errorf(volume.Unsupported, "volume %s: the driver %s gave it to the handler %q by the "+
		"Runtime API, which knows handlers.default alone, and the policy wants %q: the driver must answer what to mount instead, or set "+
		"handlers.default to %q; until then exclude the volume by a policy rule", w.Path, w.Driver, has, want, want))
}

func noStats(driver string) error {
	return status.Errorf(codes.Unimplemented, "driver %s does not report volume stats, and the volume is not deferred", driver)
}

func checkRange(target string, wanted *csi.CapacityRange) error {
	required, limit := wanted.GetRequiredBytes(), wanted.GetLimitBytes()
	if required < 0 || limit < 0 || (limit > 0 && required > limit) {
		return volume.Errorf(volume.Invalid, "volume %s: the capacity range (required %d, limit %d) holds no size", target, required, limit)
	}
	return nil
}

func deviceNotGrown(v *volume.Volume, driver string, size, required int64) error {
	return volume.Errorf(volume.Busy, "volume %s: the driver %s has not grown the device %s: it has %d bytes, and %d are wanted; "+
		"look at the driver's log, and whether the volume was grown by its controller", v.Target, driver, v.Device.Path, size, required)
}

func sizeUnknown(v *volume.Volume) error {
	return volume.Errorf(volume.Busy, "volume %s: the size of its device %s cannot be read, so its filesystem is not grown: is the device "+
		"still there? See the kernel's log", v.Target, v.Device.Path)
}

func cannotDeferAnyMore(target, driver string) error {
	return failedPrecondition("volume %s: the driver %s deferred its filesystem and cannot do so any more (was it downgraded?): "+
		"it would mount or grow the filesystem on the host; upgrade it again", target, driver)
}

func statsOfNoPod(path string) error {
	return volume.Errorf(volume.NotFound, "volume %s: the volume is staged as a device and no pod has it there, so nobody has its filesystem mounted",
		refusal.Clip(path))
}

func growthOfNoPod(path string) error {
	return failedPrecondition("volume %s: it is staged as a device and no pod has it, so it is not grown: repeat the call when it is published",
		refusal.Clip(path))
}

func recordUnusable(target string) error {
	return failedPrecondition("volume %s: its record cannot be used, so its device is not grown: "+refusal.DeletePod, target)
}

func sandboxCannotGrow(v *volume.Volume) string {
	return fmt.Sprintf("volume %s: the sandboxes of handler %s cannot grow its filesystem", v.Target, v.Handler)
}
