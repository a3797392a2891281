package staging

import (
	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

func recordError(id VolumeID, err error) error {
	return volume.Errorf(volume.DiskKind(err), "volume %s of driver %s: its record cannot be written: %w", refusal.Clip(id.ID), id.Driver, err)
}

func markError(id VolumeID, dir string, err error) error {
	return volume.Errorf(volume.DiskKind(err), "volume %s of driver %s: before a sandbox gets it read-write, this must be recorded below %s, and that failed: %w",
		refusal.Clip(id.ID), id.Driver, dir, err)
}

func marksGone(made, dir string, err error) error {
	return volume.Errorf(volume.Internal, "this node had marks (%s says where), and a new directory would forget them: mount or move the old one there, or mkdir -m 700 %s if this node was reset, or is a copy of another: %w", made, dir, err)
}

func stateDirError(kind volume.Kind, step string, err error) error {
	return volume.Errorf(kind, "the state directory cannot be %s: %w", step, err)
}

func noBlockAdvice(rule string) string {
	return " (it is to be deferred by " + rule + "; where the driver cannot give this volume as a block device, exclude it by " +
		"a policy rule with defer: false before that one)"
}

func noRawBlock(driver, rule, did string) error {
	if did != "" {
		did = ": when it was asked for a device, it " + did
	}
	return refusal.WithParty(refusal.PartyDriver, volume.Errorf(volume.Unsupported, "the driver %s has no raw block volumes%s%s",
		driver, did, noBlockAdvice(rule)))
}

func stillMounted(driver, where string) error {
	return volume.Errorf(volume.Busy, "the driver %s was asked to unstage the volume, but something is still mounted at %s", driver, where)
}

func stillWritten(id VolumeID, err error) error {
	return volume.Errorf(volume.Busy, "volume %s of driver %s: it is not given back yet: %w", refusal.Clip(id.ID), id.Driver, err)
}

func tooManyLayers(driver, device string) error {
	return volume.Errorf(volume.Busy, "the driver %s was asked %d times to unpublish the device, and something is still mounted at %s",
		driver, maxLayers, device)
}

// restageAdvice begins the errors of a volume that cannot be staged anew.
const restageAdvice = "volume %s of driver %s: it has to be staged anew (the policy's verdict changed, or a stage was interrupted), "

func requestNotKept(rec *Record) error {
	return volume.Errorf(volume.InUse, restageAdvice+"and kubelet's request to stage it was not kept, because the policy then in force could not "+
		"defer the volume: delete every pod on this node that uses the volume, wait until kubelet has unstaged it (nothing is "+
		"mounted at %s any more), and create the pods again", refusal.Clip(rec.ID), rec.Driver, rec.Stage.Path)
}

func secretsLost(rec *Record) error {
	return volume.Errorf(volume.InUse, restageAdvice+"and its secrets are not known since crust-proxy was restarted, for they are kept in memory only: "+
		"delete every pod on this node that uses the volume, so that kubelet stages it anew", refusal.Clip(rec.ID), rec.Driver)
}

func storedRequestUnreadable(rec *Record, err error) error {
	return volume.Errorf(volume.Internal, "volume %s: the remembered stage cannot be read: %w", refusal.Clip(rec.ID), err)
}
