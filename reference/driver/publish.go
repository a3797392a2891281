package driver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
	"github.com/crust-proxy/crust-proxy/internal/ground/size"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
	"github.com/crust-proxy/crust-proxy/pkg/volume/mountopt"
)

const ephemeralKey = "csi.storage.k8s.io/ephemeral"

type publishing struct {
	node                *nodeServer
	id, staging, target string
	want                access
	as                  publication
	attributes          map[string]string
	made                bool // the target did not exist
}

// NodePublishVolume mounts a staged volume at a target, or answers what the sandbox has to mount.
func (n *nodeServer) NodePublishVolume(ctx context.Context, req *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	p, err := n.readPublish(req)
	if err != nil {
		return nil, err
	}
	release, err := n.locks.take(ctx, p.id)
	if err != nil {
		return nil, err
	}
	defer release()
	r, err := p.volume()
	if err != nil {
		return nil, err
	}
	known, err := p.compare(n.current(r))
	if err != nil {
		return nil, err
	}
	if !known {
		if err := p.record(r); err != nil {
			return nil, err
		}
	}
	reply := &csi.NodePublishVolumeResponse{}
	if err := p.carryOut(ctx, r, reply); err != nil {
		if known {
			return nil, notUndone(err)
		}
		return nil, afterUndo(err, p.undo(r))
	}
	return reply, nil
}

// record records the publication. If that fails, an ephemeral volume is removed again, which was made for it.
func (p *publishing) record(r *record) error {
	_, err := p.node.pool.mountedAt(p.id, p.target) // refuses a foreign mount before anything is recorded
	if err == nil {
		if r.Node.Published == nil {
			r.Node.Published = make(map[string]publication)
		}
		r.Node.Published[p.target] = p.as
		err = p.node.pool.store.save(r)
	}
	if err == nil {
		failpoint.Hit("driver-publish-recorded")
		return nil
	}
	if r.Ephemeral {
		return afterUndo(err, p.node.forget(r, p.target))
	}
	return err
}

func (n *nodeServer) readPublish(req *csi.NodePublishVolumeRequest) (*publishing, error) {
	want, err := readAccess(req.GetVolumeCapability())
	p := &publishing{
		node: n, id: req.GetVolumeId(), staging: req.GetStagingTargetPath(), target: req.GetTargetPath(), want: want,
		attributes: req.GetVolumeContext(),
	}
	if err := cmp.Or(checkID(p.id), checkPath("target_path", p.target), err); err != nil {
		return nil, err
	}
	p.as = publication{
		Block: p.want.block, ReadOnly: req.GetReadonly() || p.want.readOnly, Sole: p.want.sole,
		Deferred: n.config.Defer && csidefer.Requested(req),
	}
	switch {
	case csidefer.Requested(req) && !n.config.Defer:
		return nil, status.Errorf(codes.InvalidArgument, "volume %q: defer_fs_ops is set, but this driver runs without --defer", p.id)
	case p.as.Deferred && p.as.Block:
		return nil, status.Errorf(codes.InvalidArgument, "volume %q: defer_fs_ops is set for a block volume, which has no filesystem", p.id)
	case p.ephemeral() && p.as.Block:
		return nil, status.Errorf(codes.InvalidArgument, "volume %q: an ephemeral volume cannot be a block volume", p.id)
	}
	return p, nil
}

func (p *publishing) ephemeral() bool { return p.attributes[ephemeralKey] == "true" }

// volume returns the record of a staged volume, or of an ephemeral one, which is made here.
func (p *publishing) volume() (*record, error) {
	if p.ephemeral() {
		return p.ephemeralVolume()
	}
	r, err := p.node.pool.find(p.id)
	if err != nil {
		return nil, err
	}
	if r.Ephemeral {
		return nil, status.Errorf(codes.AlreadyExists, "volume %q is an ephemeral volume", p.id)
	}
	staged := p.node.current(r)
	if staged == nil || staged.Staging == "" || staged.Staging != p.staging {
		return nil, status.Errorf(codes.FailedPrecondition, "volume %q is not staged at the staging_target_path %q", p.id, p.staging)
	}
	if staged.Block != p.as.Block || staged.FSType != p.want.fsType {
		return nil, status.Errorf(codes.FailedPrecondition, "volume %q is staged for another access type or filesystem: unstage it first", p.id)
	}
	return r, nil
}

// compare reports whether the publication is known, and checks a new one against the others.
func (p *publishing) compare(current *node) (known bool, err error) {
	if there, ok := current.Published[p.target]; ok {
		if there != p.as {
			return true, status.Errorf(codes.AlreadyExists, "volume %q is published at %s in another way", p.id, p.target)
		}
		return true, nil
	}
	for target, other := range current.Published {
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
	if !p.as.ReadOnly || !p.as.Block && !p.as.Deferred { // a mount on the node replays the log
		if err := p.node.pool.beginWriting(r, p.as.Block); err != nil {
			return err
		}
	}
	device, err := p.node.pool.attach(r, p.as.Block && p.as.ReadOnly)
	if err != nil {
		return err
	}
	switch {
	case p.as.Deferred:
		return p.deferred(ctx, r, device, reply)
	case p.as.Block:
		return p.bindTarget(device)
	case r.Ephemeral:
		return p.mountEphemeral(ctx, device)
	}
	if err := p.node.fs.mountFS(ctx, p.id, device, p.staging, p.want); err != nil {
		return err
	}
	return p.bindTarget(p.staging)
}

// deferred answers what the sandbox has to mount. The filesystem must not be mounted at the staging path.
func (p *publishing) deferred(ctx context.Context, r *record, device string, reply *csi.NodePublishVolumeResponse) error {
	if !p.ephemeral() {
		if err := p.node.pool.unmountVolume(p.id, p.staging); err != nil {
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
	if r.Source.id() != "" && p.want.fsType == "xfs" { // the original may be in the same sandbox
		flags = append([]string{sharedUUID}, flags...)
		// A frozen xfs always has something in its log, which cannot be replayed from a read-only device.
		if p.as.ReadOnly && r.AsFrozen && !mountopt.SkipsReplay(flags) {
			flags = append(flags, mountopt.NoReplay(p.want.fsType))
		}
	}
	csidefer.Respond(reply, csidefer.Mount{Device: device, FSType: p.want.fsType, Flags: flags})
	return nil
}

// prepare makes the filesystem if the device is blank. It reads that only once: later a sandbox may be writing to it.
func (p *publishing) prepare(ctx context.Context, r *record, device string) error {
	if r.Holds == p.want.fsType {
		return nil
	}
	if err := p.node.fs.makeFS(ctx, p.id, device, p.want); err != nil {
		return err
	}
	failpoint.Hit("driver-prepared")
	r.Holds = p.want.fsType
	return p.node.pool.store.save(r)
}

// bindTarget mounts the staged filesystem, or the device, at the target.
func (p *publishing) bindTarget(source string) error {
	if m, err := p.node.pool.mountedAt(p.id, p.target); err != nil || m != nil {
		return err
	}
	if err := p.makeTarget(); err != nil {
		return err
	}
	if err := bind(source, p.target, p.as.ReadOnly); err != nil {
		return fmt.Errorf("volume %q: %w", p.id, err)
	}
	failpoint.Hit("driver-published")
	return nil
}

func (p *publishing) makeTarget() (err error) {
	if p.as.Block {
		f, failed := os.OpenFile(p.target, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		err = cmp.Or(failed, f.Close()) // without a file it fails, too
	} else {
		err = os.Mkdir(p.target, 0o750)
	}
	p.made = err == nil
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("volume %q: make the target: %w", p.id, err)
	}
	return nil
}

func (p *publishing) undo(r *record) error {
	remove := p.node.pool.unmountVolume
	if p.made {
		remove = p.node.clearTarget
	}
	if err := remove(p.id, p.target); err != nil {
		return err
	}
	return p.node.forget(r, p.target)
}

// NodeUnpublishVolume undoes NodePublishVolume. It succeeds for unknown volumes and targets.
func (n *nodeServer) NodeUnpublishVolume(ctx context.Context, req *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	id, target := req.GetVolumeId(), req.GetTargetPath()
	if err := cmp.Or(checkID(id), checkPath("target_path", target)); err != nil {
		return nil, err
	}
	r, release, err := n.locks.record(ctx, id, n.pool.volume)
	if err != nil {
		return nil, err
	}
	defer release()
	return &csi.NodeUnpublishVolumeResponse{}, n.unpublish(r, id, target, csidefer.Requested(req))
}

func (n *nodeServer) unpublish(r *record, id, target string, deferred bool) error {
	known := false
	if there := n.current(r); there != nil {
		var as publication
		as, known = there.Published[target]
		deferred = deferred || as.Deferred
	}
	// Nothing at the target of a deferred volume is ours.
	if !deferred {
		err := n.clearTarget(id, target)
		// With a foreign mount there, it is not published there, unless the record says so.
		if _, foreign := errors.AsType[foreignError](err); err != nil && (known || !foreign) {
			return err
		}
	}
	if r == nil {
		return nil
	}
	failpoint.Hit("driver-target-cleared")
	return n.forget(r, target)
}

func (n *nodeServer) clearTarget(id, target string) error {
	if err := n.pool.unmountVolume(id, target); err != nil {
		return err
	}
	if err := sys.UnlessMissing(os.Remove(target)); err != nil {
		return fmt.Errorf("volume %q: remove the target: %w", id, err)
	}
	return nil
}

// forget releases what only this publication needed, and removes it from the record.
func (n *nodeServer) forget(r *record, target string) error {
	if r.Node != nil {
		delete(r.Node.Published, target)
	}
	there := n.current(r)
	if r.Ephemeral {
		if there != nil && len(there.Published) > 0 {
			return n.pool.store.save(r)
		}
		if err := n.pool.detach(r.ID, false); err != nil {
			return err
		}
		return n.pool.erase(r)
	}
	if there == nil {
		return nil
	}
	if err := n.release(r.ID, there); err != nil {
		return err
	}
	return n.pool.store.save(r)
}

// release detaches read-only devices that are not needed any more. A native driver also unmounts the staging path.
func (n *nodeServer) release(id string, there *node) error {
	reader, mounted := false, false
	for _, one := range there.Published {
		reader = reader || one.Block && one.ReadOnly
		mounted = mounted || !one.Block && !one.Deferred
	}
	if there.Block && !there.ReadOnly && !reader {
		if err := n.pool.detach(id, true); err != nil {
			return err
		}
	}
	if n.config.Defer && !there.Block && !mounted && there.Staging != "" {
		return n.pool.unmountVolume(id, there.Staging)
	}
	return nil
}

// sizeKey is the one attribute that a pod gives its inline volume.
const sizeKey = "size"

func (p *publishing) ephemeralVolume() (*record, error) {
	size, err := p.ephemeralSize()
	if err != nil {
		return nil, err
	}
	r, err := p.node.pool.store.load(p.id)
	if err != nil {
		return nil, err
	}
	if r != nil && !r.Ephemeral {
		return nil, status.Errorf(codes.AlreadyExists, "volume %q is a persistent volume", p.id)
	}
	// One that was removed in part is not used again.
	if r, err = p.node.pool.existing(p.id); err != nil {
		return nil, err
	}
	if r == nil {
		r = &record{Version: recordVersion, ID: p.id, Capacity: size, Created: time.Now().UTC(), Ephemeral: true}
		if err := p.node.pool.provisionBlank(r); err != nil {
			return nil, err
		}
	}
	if p.node.current(r) == nil {
		r.Node = &node{Boot: p.node.boot, FSType: p.want.fsType}
	}
	return r, nil
}

func (p *publishing) ephemeralSize() (int64, error) {
	text := ""
	for key, value := range p.attributes {
		switch {
		case key == sizeKey:
			text = value
		case !strings.HasPrefix(key, kubernetesKey):
			return 0, status.Errorf(codes.InvalidArgument, "volume %q: the attribute %q is not known; there is size", p.id, key)
		}
	}
	if text == "" {
		return defaultSize, nil
	}
	bytes, err := size.Parse(text)
	if err != nil {
		return 0, status.Errorf(codes.InvalidArgument, "volume %q: size: %v", p.id, err)
	}
	if bytes > mostSize {
		return 0, status.Errorf(codes.OutOfRange, "volume %q: size %q is more than a volume can have", p.id, text)
	}
	return (max(bytes, leastSize) + sizeGrain - 1) / sizeGrain * sizeGrain, nil
}

// mountEphemeral mounts the volume at the target itself: there is no staging path.
func (p *publishing) mountEphemeral(ctx context.Context, device string) error {
	want := p.want
	if p.as.ReadOnly {
		if m, err := p.node.pool.mountedAt(p.id, p.target); err != nil || m != nil {
			return err // a device that is mounted cannot be examined
		}
		// A new device has no filesystem yet: it is made with write access.
		want.readOnly = false
		if err := p.node.fs.makeFS(ctx, p.id, device, want); err != nil {
			return err
		}
		want.readOnly = true
	}
	if err := p.makeTarget(); err != nil {
		return err
	}
	return p.node.fs.mountFS(ctx, p.id, device, p.target, want)
}
