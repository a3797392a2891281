package daemon

import (
	"cmp"
	"context"
	"path/filepath"
	"strconv"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/internal/config"
	"github.com/crust-proxy/crust-proxy/internal/mkfs"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

type preparer struct{ formatter *mkfs.Formatter }

func newPreparer(cfg *config.Config, log *zap.Logger) (*preparer, error) {
	formatter, err := mkfs.New(mkfs.Config{Log: log.Named("format"), LockFile: filepath.Join(cfg.RunDir, "format.lock"),
		AcceptLeftovers: cfg.Front.AcceptLeftovers})
	return &preparer{formatter: formatter}, err
}

// Prepare looks at a device, and formats it where policy says so.
func (p *preparer) Prepare(ctx context.Context, d deferral.Preparation) error {
	policy := d.Format
	if policy == volume.FormatGuest && !d.GuestFormats {
		// A sandbox that formats whatever it is given would do so at its second
		// start too.
		policy = volume.FormatNever
	}
	request := mkfs.Request{
		Device: d.Device, Volume: d.Target, Path: d.Path, FSType: d.FSType, Policy: policy, ReadOnly: d.ReadOnly,
		Options: d.MakeFS.Options, Root: rootOf(d), Grow: d.Grow,
	}
	if policy != volume.FormatUnset {
		if _, err := p.formatter.Prepare(ctx, request); err != nil {
			return err
		}
	}
	if !d.ReadOnly || d.NoReplay {
		return nil
	}
	return p.formatter.CheckReplay(ctx, request)
}

// rootOf is the root directory of a new filesystem. A group may write, as kubelet has
// it, so that no sandbox has to change it.
func rootOf(d deferral.Preparation) mkfs.Root {
	const groupWrites = 0o2070
	root := mkfs.Root{Mode: d.MakeFS.RootMode}
	group, err := strconv.ParseUint(d.Group, 10, 32)
	if err == nil && group != 0 {
		root.Group, root.Mode = uint32(group), cmp.Or(root.Mode, 0o755)|groupWrites
	}
	return root
}
