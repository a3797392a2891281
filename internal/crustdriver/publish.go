package crustdriver

import (
	"context"
	"errors"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/failpoint"
	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
)

const ephemeralKey = "csi.storage.k8s.io/ephemeral"

// publishing is one NodePublishVolume.
type publishing struct {
	*Driver
	id, staging, target string
	want                access
	as                  publication
	attributes          map[string]string
	made                bool // the target was missing
}

// NodePublishVolume shows a staged volume at a target, or answers what the
// sandbox shall mount.
func (d *Driver) NodePublishVolume(ctx context.Context, req *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	p, err := d.readPublish(req)
	if err != nil {
		return nil, err
	}
	release, err := d.locks.take(ctx, p.id)
	if err != nil {
		return nil, err
	}
	defer release()
	r, err := p.volume()
	if err != nil {
		return nil, err
	}
	known, err := p.compare(d.present(r))
	if err != nil {
		return nil, err
	}
	if !known {
		if _, err := d.mountedAt(p.id, p.target); err != nil {
			return nil, err // before anything is recorded: what is foreign stays
		}
		r.publish(p.target, p.as)
		if err := d.store.save(r); err != nil {
			return nil, err
		}
		failpoint.Hit("driver-publish-recorded")
	}
	reply := &csi.NodePublishVolumeResponse{}
	if err := p.carryOut(ctx, r, reply); err != nil {
		if !known {
			err = errors.Join(err, p.undo(r))
		}
		return nil, err
	}
	return reply, nil
}

func (d *Driver) readPublish(req *csi.NodePublishVolumeRequest) (*publishing, error) {
	p := &publishing{
		Driver: d, id: req.GetVolumeId(), staging: req.GetStagingTargetPath(), target: req.GetTargetPath(),
		attributes: req.GetVolumeContext(),
	}
	if err := errors.Join(checkID(p.id), checkPath("target_path", p.target)); err != nil {
		return nil, err
	}
	var err error
	if p.want, err = readAccess(req.GetVolumeCapability()); err != nil {
		return nil, err
	}
	p.as = publication{
		Block: p.want.block, ReadOnly: req.GetReadonly() || p.want.readOnly, Sole: p.want.sole,
		Deferred: d.config.Defer && csidefer.Requested(req),
	}
	switch {
	case csidefer.Requested(req) && !d.config.Defer:
		return nil, status.Errorf(codes.InvalidArgument, "volume %q: defer_fs_ops is set, but this driver runs without --defer", p.id)
	case p.as.Deferred && p.as.Block:
		return nil, status.Errorf(codes.InvalidArgument, "volume %q: defer_fs_ops is set for a block volume, which has no filesystem", p.id)
	case p.ephemeral() && p.as.Block:
		return nil, status.Errorf(codes.InvalidArgument, "volume %q: an ephemeral volume cannot be a block volume", p.id)
	}
	return p, nil
}

func (p *publishing) ephemeral() bool { return p.attributes[ephemeralKey] == "true" }

// volume gives the volume's record: of one that is staged, or an ephemeral one,
// which begins here.
func (p *publishing) volume() (*record, error) {
	if p.ephemeral() {
		return p.begin()
	}
	r, err := p.find(p.id)
	if err != nil {
		return nil, err
	}
	if r.Ephemeral {
		return nil, status.Errorf(codes.AlreadyExists, "volume %q is an ephemeral volume", p.id)
	}
	staged := p.present(r)
	if staged == nil || staged.Staging == "" || staged.Staging != p.staging {
		return nil, status.Errorf(codes.FailedPrecondition, "volume %q is not staged at the staging_target_path %q", p.id, p.staging)
	}
	if staged.Block != p.as.Block {
		return nil, status.Errorf(codes.FailedPrecondition, "volume %q is staged for the other access type: unstage it first", p.id)
	}
	return r, nil
}

// compare looks at the other publications, and tells whether this one is known.
func (p *publishing) compare(present *node) (known bool, err error) {
	if there, ok := present.Published[p.target]; ok {
		if there != p.as {
			return true, status.Errorf(codes.AlreadyExists, "volume %q is published at %s in another way", p.id, p.target)
		}
		return true, nil
	}
	for target, other := range present.Published {
		switch {
		case p.as.Sole || other.Sole:
			err = status.Errorf(codes.FailedPrecondition, "volume %q is for one pod only and is published at %s", p.id, target)
		case p.as.Deferred != other.Deferred:
			err = status.Errorf(codes.FailedPrecondition,
				"volume %q: it is published at %s, and a filesystem cannot be mounted on the node and in a sandbox at once", p.id, target)
		case p.as.Deferred && (!p.as.ReadOnly || !other.ReadOnly):
			err = status.Errorf(codes.FailedPrecondition,
				"volume %q: it is published at %s, and two sandboxes cannot have it unless both only read", p.id, target)
		}
	}
	return false, err
}

func (p *publishing) carryOut(ctx context.Context, r *record, reply *csi.NodePublishVolumeResponse) error {
	device, err := p.attach(p.id, p.as.Block && p.as.ReadOnly)
	if err != nil {
		return err
	}
	switch {
	case p.as.Deferred:
		return p.deferred(ctx, r, device, reply)
	case p.as.Block:
		return p.show(device)
	case r.Ephemeral:
		return p.mountEphemeral(ctx, device)
	}
	if err := p.mountFS(ctx, p.id, device, p.staging, p.want); err != nil {
		return err
	}
	return p.show(p.staging)
}

// deferred answers what the sandbox shall mount. The staging path is kept free of
// the filesystem.
func (p *publishing) deferred(ctx context.Context, r *record, device string, reply *csi.NodePublishVolumeResponse) error {
	if !p.ephemeral() {
		if err := p.unmountVolume(p.id, p.staging); err != nil {
			return err
		}
	}
	if err := p.prepare(ctx, r, device); err != nil {
		return err
	}
	flags := p.want.flags
	if p.as.ReadOnly {
		flags = append([]string{"ro"}, flags...)
	}
	csidefer.Respond(reply, csidefer.Mount{Device: device, FSType: p.want.fsType, Flags: flags})
	return nil
}

// prepare makes sure, once, that the device holds the filesystem. When the same
// publish comes again the sandbox has the device, and nobody may look at it.
func (p *publishing) prepare(ctx context.Context, r *record, device string) error {
	if r.Holds == p.want.fsType {
		return nil
	}
	if err := p.makeFS(ctx, p.id, device, p.want); err != nil {
		return err
	}
	failpoint.Hit("driver-prepared")
	r.Holds = p.want.fsType
	return p.store.save(r)
}

// show binds the staged filesystem, or the device, to the target.
func (p *publishing) show(source string) error {
	if m, err := p.mountedAt(p.id, p.target); err != nil || m != nil {
		return err
	}
	var err error
	if p.made, err = makeTarget(p.target, p.as.Block); err != nil {
		return fmt.Errorf("volume %q: make the target: %w", p.id, err)
	}
	if err := bind(source, p.target, p.as.ReadOnly); err != nil {
		return fmt.Errorf("volume %q: %w", p.id, err)
	}
	failpoint.Hit("driver-published")
	return nil
}

// undo takes back a publish that failed.
func (p *publishing) undo(r *record) error {
	if err := p.unmountVolume(p.id, p.target); err != nil {
		return err
	}
	if p.made {
		if err := removeTarget(p.target); err != nil {
			return err
		}
	}
	return p.forget(r, p.target)
}
