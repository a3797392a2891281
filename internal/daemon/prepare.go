package daemon

import (
	"cmp"
	"context"
	"path/filepath"
	"strconv"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/internal/daemon/config"
	"github.com/crust-proxy/crust-proxy/internal/disk/mkfs"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

type preparer struct{ formatter *mkfs.Formatter }

func newPreparer(cfg *config.Config, log *zap.Logger) *preparer {
	return &preparer{mkfs.New(mkfs.Config{
		Log: log.Named("format"), LockFile: filepath.Join(cfg.RunDir, "format.lock"), AcceptLeftovers: cfg.Front.AcceptLeftovers,
	})}
}

// Prepare examines a device, and formats it if the policy says so.
func (p *preparer) Prepare(ctx context.Context, d deferral.Preparation) error {
	v, policy := d.Volume, d.Instruction.Format
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
		Device: d.Device, Volume: v.Target, Path: v.Device.Path, FSType: v.FSType, Policy: policy,
		ReadOnly: v.ReadOnly || policy == volume.FormatDriver && !d.Grow,
		Options:  d.Instruction.MakeFS.Options, Root: rootOf(v.Group, d.Instruction.MakeFS.RootMode), Grow: d.Grow,
	}
	if policy != volume.FormatUnset {
		if _, err := p.formatter.Prepare(ctx, request); err != nil {
			return err
		}
	}
	if !v.ReadOnly || d.NoReplay {
		return nil
	}
	return p.formatter.CheckReplay(ctx, request)
}

// writing returns an error while a program that was started by Prepare writes to the device
// of a CSI volume.
func (p *preparer) writing(driver, volumeID string) error {
	return p.formatter.CheckWriting(writerID(driver, volumeID))
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
