package driver

import (
	"context"
	"fmt"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// sizeKey is the one attribute that a pod gives its inline volume.
const sizeKey = "size"

// ephemeralVolume returns the record of an ephemeral volume, which it makes if there is none.
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
	size, err := parseSize(text)
	if err != nil {
		return 0, status.Errorf(codes.InvalidArgument, "volume %q: size %q: %v", p.id, text, err)
	}
	if size > mostSize {
		return 0, status.Errorf(codes.OutOfRange, "volume %q: size %q is more than a volume can have", p.id, text)
	}
	return (max(size, leastSize) + sizeGrain - 1) / sizeGrain * sizeGrain, nil
}

// mountEphemeral mounts the volume at the target itself: there is no staging path.
func (p *publishing) mountEphemeral(ctx context.Context, device string) error {
	want := p.want
	want.readOnly = p.as.ReadOnly
	if p.as.ReadOnly {
		// A new device has no filesystem yet: it is made with write access.
		want.readOnly = false
		if err := p.node.fs.makeFS(ctx, p.id, device, want); err != nil {
			return err
		}
		want.readOnly = true
	}
	made, err := makeTarget(p.target, false)
	if err != nil {
		return fmt.Errorf("volume %q: make the target: %w", p.id, err)
	}
	p.made = made
	return p.node.fs.mountFS(ctx, p.id, device, p.target, want)
}
