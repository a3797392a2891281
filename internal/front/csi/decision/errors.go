package decision

import (
	"time"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// PodText names a pod in an error.
func PodText(namespace, name string) string { return "the pod " + namespace + "/" + name }

func deferredOrNot(deferred bool) string {
	if deferred {
		return "deferred"
	}
	return "mounted on the host"
}

// Unreadable is the error of a request that cannot be parsed.
func Unreadable(err error) error {
	return volume.Errorf(volume.Invalid, "the request cannot be read: %w", err)
}

func requestedForBlock(target string) error {
	return volume.Errorf(volume.Invalid, "volume %s: defer_fs_ops is set for a raw block volume, which has no filesystem", refusal.Clip(target))
}

func groupWithoutRequest(target string) error {
	return volume.Errorf(volume.Invalid, "volume %s: a supplemental group or its change policy comes without defer_fs_ops", refusal.Clip(target))
}

// podsDiffer is the error of a publish that names one pod and has the target of another.
func podsDiffer(named, ofTarget string) error {
	return volume.Errorf(volume.Invalid, "%s says that it is for the pod %s, and its target lies in the directory of the pod "+
		"%s: one of them is wrong, so nothing is published; look at who calls the driver", PodUIDKey, refusal.Clip(named), refusal.Clip(ofTarget))
}

func annotationNamesNothing(name string) error {
	return volume.Errorf(volume.Invalid, "the pod's annotation %s names %q, and the pod has no volume of that name "+
		"that a CSI driver gives: correct the annotation", policy.AnnotationKey, name)
}

func annotationNamesBlock(name string) error {
	return volume.Errorf(volume.Invalid, "the pod's annotation %s names %q, which is a raw block volume and has no "+
		"filesystem to defer: take it out of the annotation", policy.AnnotationKey, name)
}

func volumeUnknown(why error) error {
	return volume.Errorf(volume.KindOf(why), "it is not known which of the pod's volumes it is: %w", why)
}

func volumeNotInPod(driver, volumeID string) error {
	return volume.Errorf(volume.Busy, "the cluster knows no volume %s of driver %s in the pod yet: it is asked again",
		refusal.Clip(volumeID), driver)
}

func noPodKnown(req *VolumeRequest) error {
	return volume.Errorf(volume.Busy, "no pod of this node that uses the volume %s of driver %s is known yet: the cluster is asked "+
		"again", refusal.Clip(req.VolumeID), req.Driver)
}

func severalNodesWrite(req *VolumeRequest, verdict *policy.Verdict) error {
	return volume.Errorf(volume.Unsupported, "volume %s: it is to be deferred (%s), and its access "+
		"mode %s lets several nodes write, which destroys a filesystem on a device: use ReadWriteOnce or ReadWriteOncePod, or "+
		"exclude it by a policy rule", req.Path, verdict.Rule, req.AccessMode)
}

// InlineAsDevice is the error of an inline volume whose driver cannot defer by itself.
func InlineAsDevice(req *VolumeRequest, verdict *policy.Verdict) error {
	return refusal.WithParty(refusal.PartyDriver, volume.Errorf(volume.Unsupported, "volume %s: it is to be deferred (%s), and the driver "+
		"%s cannot defer by itself: an inline ephemeral volume cannot be asked for as a block device; use a generic ephemeral "+
		"volume (a volumeClaimTemplate), or exclude it by a policy rule", req.Path, verdict.Rule, req.Driver))
}

func noSubPaths(req *VolumeRequest, verdict *policy.Verdict, subPath string) error {
	return volume.Errorf(volume.Unsupported, "volume %s: it is to be deferred (%s), a container mounts its "+
		"sub-directory %q by subPath, and sandboxes of the handler %s show whole volumes only: mount all of it and use the "+
		"sub-directory in the container, or keep it on the host by a policy rule with needs: [subPath]", req.Path, verdict.Rule, refusal.Clip(subPath), verdict.Handler)
}

func publishedOtherwise(req *VolumeRequest, verdict *policy.Verdict, deferred bool, holder string) error {
	return volume.Errorf(volume.InUse, "volume %s: it is to be %s (%s), and the volume is %s for %s: "+
		"it can be published in one way at a time; "+refusal.WaitForIt, req.Path, deferredOrNot(verdict.Defer),
		verdict.Rule, deferredOrNot(deferred), holder)
}

func hadBySandbox(req *VolumeRequest, mark *Mark) error {
	if mark.Err != nil {
		return volume.Errorf(volume.Internal, "volume %s: it is not known whether a sandbox had it read-write, and the node's kernel does not "+
			"mount what a guest may have written: repair %s, or set thenOnHost: allow in the policy's rule: %w",
			req.Path, mark.Path, mark.Err)
	}
	return volume.Errorf(volume.Denied, "volume %s: a sandbox had it read-write on this node (handler %q, %s, since %s), and the node's kernel "+
		"does not mount what a guest may have written: let the pod have it in a sandbox (crustctl explain says which rule keeps it out), set thenOnHost: allow in that rule, or remove "+
		"the file %s", req.Path, mark.Handler, mark.Rule, mark.Since.Format(time.RFC3339), mark.Path)
}

func secondWriter(req *VolumeRequest, holder string, couldShare bool) error {
	advice := ""
	if couldShare {
		advice = "; or, as every container of this pod mounts it read-only, say readOnly: true in the persistentVolumeClaim volume " +
			"of each pod that only reads, then several pods can share it"
	}
	return volume.Errorf(volume.InUse, "volume %s: the volume is published for %s: one sandbox can "+
		"have it read-write, or several read-only; "+refusal.WaitForIt+"%s", req.Path, holder, advice)
}

func rawBesideSandbox(req *VolumeRequest, holder string) error {
	return volume.Errorf(volume.InUse, "volume %s: it is asked for as a raw device, and %s has the "+
		"volume's filesystem in its sandbox: a device can have one read-write owner; "+refusal.WaitForIt, req.Path, holder)
}

func sandboxBesideRaw(req *VolumeRequest, holder string) error {
	return volume.Errorf(volume.InUse, "volume %s: the volume is published as a raw device for %s: a device can have one read-write "+
		"owner; "+refusal.WaitForIt, req.Path, holder)
}

func anotherVolume(v *volume.Volume, driver, volumeID string) error {
	return volume.Errorf(volume.InUse, "volume %s: the volume %s of driver %s is published there, and this call "+
		"is for the volume %s of driver %s: unpublish the other one first", v.Target, refusal.Clip(v.Origin.VolumeID), v.Driver,
		refusal.Clip(volumeID), driver)
}
