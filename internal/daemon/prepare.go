package daemon

import (
	"cmp"
	"context"
	"strconv"

	"github.com/crust-proxy/crust-proxy/internal/disk/mkfs"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Prepare examines a device, and formats it if the policy says so.
func (d *disks) Prepare(ctx context.Context, asked deferral.Preparation) error {
	v, policy := asked.Volume, asked.Instruction.Format
	if policy == volume.FormatGuest {
		// No handler's sandboxes can be trusted to format only a blank device: a sandbox
		// that is created again would format again.
		policy = volume.FormatNever
	}
	var id string
	if v.Origin != nil {
		id = writerID(v.Driver, v.Origin.VolumeID)
	}
	request := mkfs.Request{
		ID:     id,
		Device: asked.Device, Volume: v.Target, Path: v.Device.Path, FSType: v.FSType, Policy: policy,
		ReadOnly: v.ReadOnly || policy == volume.FormatDriver && !asked.Grow,
		Options:  asked.Instruction.MakeFS.Options, Root: rootOf(v.Group, asked.Instruction.MakeFS.RootMode), Grow: asked.Grow,
	}
	if policy != volume.FormatUnset {
		if _, err := d.formatter.Prepare(ctx, request); err != nil {
			return err
		}
	}
	if !v.ReadOnly || asked.NoReplay {
		return nil
	}
	return d.formatter.CheckReplay(ctx, request)
}

// Writing returns an error while a program that was started by Prepare writes to the device
// of a CSI volume.
func (d *disks) Writing(driver, volumeID string) error {
	return d.formatter.CheckWriting(writerID(driver, volumeID))
}

// writerID identifies a CSI volume for the formatter. No driver's name has a slash.
func writerID(driver, volumeID string) string { return driver + "/" + volumeID }

// rootOf returns owner and mode of a new filesystem's root directory. The group may write, as
// after kubelet's own change, so that no sandbox has to change it.
func rootOf(group string, mode uint32) mkfs.Root {
	const groupWrites = 0o2070
	root := mkfs.Root{Mode: mode}
	gid, err := strconv.ParseUint(group, 10, 32)
	if err == nil && gid != 0 {
		root.Group, root.Mode = uint32(gid), cmp.Or(mode, 0o755)|groupWrites
	}
	return root
}
