package crustdriver

import (
	"context"
	"errors"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-proxy/crust-proxy/internal/failpoint"
	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
)

// NodeUnpublishVolume undoes NodePublishVolume; unknown volumes and targets are
// fine.
func (d *Driver) NodeUnpublishVolume(ctx context.Context, req *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	id, target := req.GetVolumeId(), req.GetTargetPath()
	if err := errors.Join(checkID(id), checkPath("target_path", target)); err != nil {
		return nil, err
	}
	release, err := d.locks.take(ctx, id)
	if err != nil {
		return nil, err
	}
	defer release()
	r, err := d.store.load(id)
	if err != nil {
		return nil, err
	}
	return &csi.NodeUnpublishVolumeResponse{}, d.unpublish(r, id, target, csidefer.Requested(req))
}

func (d *Driver) unpublish(r *record, id, target string, deferred bool) error {
	known := false
	if there := d.present(r); there != nil {
		var as publication
		as, known = there.Published[target]
		deferred = deferred || as.Deferred
	}
	// At the target of a deferred volume nothing is ours.
	if !deferred {
		err := d.clearTarget(id, target)
		var foreign foreignError
		if errors.As(err, &foreign) && !known {
			err = nil // it is not published there
		}
		if err != nil {
			return err
		}
	}
	if r == nil {
		return nil
	}
	failpoint.Hit("driver-target-cleared")
	return d.forget(r, target)
}

func (d *Driver) clearTarget(id, target string) error {
	if err := d.unmountVolume(id, target); err != nil {
		return err
	}
	if err := removeTarget(target); err != nil {
		return fmt.Errorf("volume %q: %w", id, err)
	}
	return nil
}

// forget ends a publication: what was only there for it goes, and then its record.
func (d *Driver) forget(r *record, target string) error {
	r.unpublish(target)
	there := d.present(r)
	if r.Ephemeral {
		if there != nil && len(there.Published) > 0 {
			return d.store.save(r)
		}
		if err := d.detach(r.ID, false); err != nil {
			return err
		}
		return d.erase(r)
	}
	if there == nil {
		return nil
	}
	if err := d.release(r.ID, there); err != nil {
		return err
	}
	return d.store.save(r)
}

// release lets go of what no publication needs any more: read-only devices, and
// of a native driver the filesystem at the staging path.
func (d *Driver) release(id string, there *node) error {
	reader, mounted := false, false
	for _, one := range there.Published {
		reader = reader || one.Block && one.ReadOnly
		mounted = mounted || !one.Block && !one.Deferred
	}
	if there.Block && !there.ReadOnly && !reader {
		if err := d.detach(id, true); err != nil {
			return err
		}
	}
	if d.config.Defer && !there.Block && !mounted && there.Staging != "" {
		return d.unmountVolume(id, there.Staging)
	}
	return nil
}
