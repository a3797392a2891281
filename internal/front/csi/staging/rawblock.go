package staging

import (
	"cmp"
	"context"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/front/kubelet"
)

// withoutRawBlock are drivers that ignore the access type of a call: asked for a device, they
// format and mount the volume. Trident goes by what ControllerPublish was asked.
var withoutRawBlock = []string{"block.csi.vultr.com", "csi.civo.com", "csi.trident.netapp.io"}

// proxmox is a driver that regards a volume as raw block only if its staging path lies among
// kubelet's raw block volumes. Otherwise its unstage takes the disk around the path offline.
const proxmox = "csi.proxmox.sinextra.dev"

// CheckRawBlock refuses a driver that is known to have no raw block volumes, because it would damage
// the volume. What the driver did wrong earlier counts until the daemon restarts.
func (s *Stager) CheckRawBlock(rule string) error {
	_, seen := s.store.withoutRawBlock.Load(s.driver.Name)
	if !seen && !slices.Contains(withoutRawBlock, s.driver.Name) {
		return nil
	}
	return noRawBlock(s.driver.Name, rule, "")
}

// CheckPublished returns an error if the driver mounted a filesystem, or made a directory or a link,
// where it had to publish a device. Neither of these two says anything of the driver's other volumes.
func (s *Stager) CheckPublished(device, rule string) error {
	st, mounted := MountAt(device)
	switch {
	case st.Mode&unix.S_IFMT == unix.S_IFLNK:
		return noRawBlock(s.driver.Name, rule, "made a link at "+device)
	case !isDirectory(&st):
		return nil
	case mounted:
		return s.foundFilesystem(device, rule, &st)
	default:
		return noRawBlock(s.driver.Name, rule, "made a directory at "+device)
	}
}

func isDirectory(st *unix.Statx_t) bool { return st.Mode&unix.S_IFMT == unix.S_IFDIR }

// foundFilesystem is the error for a mounted filesystem. One on a disk shows that the driver has no raw block volumes,
// and its other volumes are refused from now on. A network filesystem does not: such a driver may serve disks too.
func (s *Stager) foundFilesystem(where, rule string, st *unix.Statx_t) error {
	var fsType string
	onDisk := st.Dev_major != 0
	this := func(info *mountinfo.Info) (skip, stop bool) { is := uint64(info.ID) == st.Mnt_id; return !is, is } //nolint:gosec // an id
	if found, err := mountinfo.GetMounts(this); err == nil && len(found) == 1 {
		fsType, onDisk = found[0].FSType, onDisk || strings.HasPrefix(found[0].Source, "/dev/") // btrfs has no device number
	}
	if onDisk {
		s.store.withoutRawBlock.Store(s.driver.Name, true)
	}
	return noRawBlock(s.driver.Name, rule, "mounted a filesystem ("+cmp.Or(fsType, "unknown")+") at "+where)
}

// undoFilesystem asks the driver to unstage the filesystem that it mounted at the private path. If a
// device was staged before, nothing is unstaged, because sandboxes may use it.
func (s *Stager) undoFilesystem(ctx context.Context, rec *Record, before *StageRecord, cause error) error {
	name := refusal.Clip(rec.ID)
	if !rec.Stage.Pending {
		return refusal.NotFinal(name, cause)
	}
	ctx, cancel := UndoContext(ctx)
	defer cancel()
	private := rec.Stage.Private
	err := s.Unstage(ctx, rec)
	if _, mounted := MountAt(private); err == nil && mounted {
		err = stillMounted(s.driver.Name, private)
	}
	if err == nil && before == nil { // kubelet does not regard it as staged
		rec.Stage = nil
		err = s.store.Records.Put(*rec)
	}
	return refusal.JoinUndo(name, cause, err)
}

// TakesDiskAround reports whether an unstage at a path without a mount would take the disk around
// the path offline. The driver must not be asked then; it has nothing to unstage there.
func (d *Driver) TakesDiskAround(path string) bool {
	return d.Name == proxmox && !kubelet.IsRawBlock(path)
}

// unstagePrivate asks the driver to unstage a device, which front.privateDir may have outside of kubelet's directory.
func (s *Stager) unstagePrivate(ctx context.Context, volumeID, private string) error {
	if s.driver.TakesDiskAround(private) {
		return nil
	}
	return s.driver.Unstage(ctx, volumeID, private)
}
